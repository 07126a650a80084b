"""The fixture `bed`: several hosts on this machine; one bed per machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bed import Bed, missing


@pytest.fixture(scope="session")
def _hosts() -> Iterator[Bed]:
    if reason := missing():
        pytest.skip(reason)
    made = Bed(3)
    made.call("up", str(len(made.names)))
    try:
        yield made
    finally:
        made.call("down")


@pytest.fixture
def bed(_hosts: Bed) -> Iterator[Bed]:
    """Hosts h1, h2, h3, with nothing running on them."""
    yield _hosts
    _hosts.repair()
