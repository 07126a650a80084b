"""The exceptions. See docs/errors.md for when each is raised and what to do."""

from ronde._core import (
    ArgumentError,
    HorovodInternalError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    RondeError,
    ShutdownError,
    StallError,
    TimeoutError,
    TransportError,
)


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts changed: elastic training goes on with the new one.

    skip_sync: whether the state need not be synchronized first (hosts were only removed).
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts changed")
        self.skip_sync = skip_sync


__all__ = [
    "ArgumentError",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "RondeError",
    "ShutdownError",
    "StallError",
    "TimeoutError",
    "TransportError",
]
