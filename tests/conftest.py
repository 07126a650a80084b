"""The mark `ranks`: @pytest.mark.ranks(2) runs a test function on 2 ranks, each a process, between init() and shutdown().

Without a number, the function's parameter `size` is it. Its parameter `environment`, if it has one, are variables that the
processes are started with. Options: init=False (the function calls init() itself), env={...} (in force while it runs),
deadline=100 (seconds), dies=(1,) (ranks whose process is expected to end). The function's arguments (parameters, fixtures)
must pickle.
"""

from typing import Optional

import pytest
from rank_pool import Failed, Job, Pools, Skipped

_POOLS = pytest.StashKey[Pools]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(size, init=True, env={}, deadline=100, dies=()): run on real ranks")
    config.stash[_POOLS] = Pools()


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_POOLS].close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Optional[bool]:
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    function = pyfuncitem.function
    options = dict(mark.kwargs)
    size = mark.args[0] if mark.args else arguments["size"]
    outcome: Optional[Exception] = None
    try:
        job = Job(function.__module__, function.__name__, arguments, **options)
        pyfuncitem.config.stash[_POOLS].run(size, arguments.get("environment", {}), job)
    except (Failed, Skipped) as error:
        outcome = error
    if isinstance(outcome, Failed):
        pytest.fail(str(outcome), pytrace=False)
    if outcome is not None:
        pytest.skip(str(outcome))
    return True
