"""Where the ranks find each other: one Cluster class for each kind of environment, which says "I am here" itself.

A cluster knows this process's rank and the job's size, and hands blobs around once; after that the ranks are connected
and need it no more.
"""

import base64
import json
import os
import re
import secrets
import socket
import time
from typing import Any, Optional

from ronde import _core
from ronde._core import ArgumentError, RondeError


class Alone:
    """Nobody started us: one rank, and no network."""

    rank, size = 0, 1
    host_name: Optional[str] = None
    store_url: Optional[str] = None  # of a store where death/<rank> says how a rank ended
    exchange_seconds = float("inf")  # the longest wait in exchange(); it may be called again with the same blob

    @classmethod
    def here(cls) -> Optional["Alone"]:
        """The cluster, if the environment says that this process was started in one of this kind."""
        return cls()

    def secret(self, timeout: float) -> str:
        """The job's secret, which strangers do not know."""
        raise NotImplementedError

    def exchange(self, key: str, index: int, count: int, blob: bytes, timeout: float) -> list[bytes]:
        """Hands in the blob number `index` of `count` and returns all; TimeoutError names who is missing."""
        raise NotImplementedError

    def end_of(self, rank: int) -> Optional[str]:
        """How the process of a rank ended; None: it lives, or nobody knows."""
        return None

    def close(self) -> None:
        """Called when the ranks are connected."""


class Ronderun(Alone):
    """Started by ronderun: its agent on this host serves a store on a socket that only this user may use."""

    exchange_seconds = 0.5

    def __init__(self) -> None:
        self.rank, self.size = _rank_and_size("RONDE_RANK", "RONDE_SIZE")
        self.host_name = os.environ.get("RONDE_HOSTNAME")
        self.store_url = os.environ["RONDE_STORE"]
        self._store: Optional[_core.Store] = None
        self._relay = os.environ.get("RONDE_RELAY")  # of the agent, where the job has ranks on other hosts
        self._told: set[str] = set()  # what the relay knows

    @classmethod
    def here(cls) -> Optional["Ronderun"]:
        if "RONDE_STORE" in os.environ:
            return cls()
        for variable, alone in (("RONDE_SIZE", "1"), ("RONDE_RANK", "0")):
            if (value := os.environ.get(variable, alone)) != alone:
                raise ArgumentError(
                    f"{variable}={value} says that this rank is one of several, but RONDE_STORE, where it meets them, is "
                    "not set: something between ronderun and this process has cleaned the environment"
                )
        return None

    def secret(self, timeout: float) -> str:
        return self._open().get("secret", timeout).decode()

    def exchange(self, key: str, index: int, count: int, blob: bytes, timeout: float) -> list[bytes]:
        if self._relay is not None and key not in self._told:
            message = {"key": key, "index": index, "count": count, "blob": base64.b64encode(blob).decode()}
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(max(timeout, 0.1))
                try:
                    sender.sendto(json.dumps(message).encode(), self._relay)
                except OSError as error:
                    raise RondeError(f"ronderun's agent does not take this rank's address: {error}") from None
            self._told.add(key)
        return self._open().exchange(key, index, count, blob, timeout)

    def end_of(self, rank: int) -> Optional[str]:
        try:
            return self._open().get(f"death/{rank}", 0.0).decode(errors="replace")
        except _core.TimeoutError:
            return None

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _open(self) -> _core.Store:
        if self._store is None:
            self._store = _core.Store(str(self.store_url))
        return self._store


class Torchrun(Alone):
    """Started by torchrun: the store is torch's own, under a prefix. As private as that store is: anybody who can
    connect to it can read the secret."""

    def __init__(self) -> None:
        self.rank, self.size = _rank_and_size("RANK", "WORLD_SIZE")
        self._attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store: Any = None

    @classmethod
    def here(cls) -> Optional["Torchrun"]:
        return cls() if "TORCHELASTIC_RUN_ID" in os.environ and "MASTER_ADDR" in os.environ else None

    def secret(self, timeout: float) -> str:
        store = self._open(timeout)
        if self.rank == 0 and not store.check(["secret"]):
            store.set("secret", secrets.token_hex(16))
        return self._get("secret", timeout).decode()

    def exchange(self, key: str, index: int, count: int, blob: bytes, timeout: float) -> list[bytes]:
        store, deadline = self._open(timeout), time.monotonic() + timeout
        store.set(f"{key}/{index}", blob)
        keys = [f"{key}/{number}" for number in range(count)]
        try:
            return [self._get(each, deadline - time.monotonic()) for each in keys]
        except _core.TimeoutError:
            missing = [str(number) for number, each in enumerate(keys) if not store.check([each])]
            raise _core.TimeoutError(f"{count} ranks were expected; missing: {', '.join(missing)}") from None

    def close(self) -> None:
        self._store = None

    def _get(self, key: str, timeout: float) -> bytes:
        from datetime import timedelta

        store = self._open(timeout)
        try:
            store.wait([key], timedelta(seconds=max(timeout, 0.001)))
        except RuntimeError as error:
            raise _core.TimeoutError(f"torchrun's store has no {key!r}: {error}") from None
        return bytes(store.get(key))

    def _open(self, timeout: float) -> Any:
        if self._store is None:
            from datetime import timedelta

            from torch.distributed import PrefixStore, TCPStore

            address, port = os.environ["MASTER_ADDR"], _identity("MASTER_PORT")
            # torchrun serves the store itself, or expects rank 0 to.
            serve = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
            store = TCPStore(
                address, port, is_master=serve, timeout=timedelta(seconds=timeout), wait_for_workers=False,
                multi_tenant=True,
            )  # fmt: skip
            self._store = PrefixStore(f"ronde/{self._attempt}", store)
        return self._store


class Communicator(Alone):
    """An mpi4py communicator that was given to init()."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()

    def secret(self, timeout: float) -> str:
        return self._comm.bcast(secrets.token_hex(16), root=0)

    def exchange(self, key: str, index: int, count: int, blob: bytes, timeout: float) -> list[bytes]:
        return self._comm.allgather(blob)


class _Unsupported(Alone):
    """A launcher that is recognized, so that its ranks do not train alone side by side without a word."""

    launcher = ""
    variables: tuple[str, str] = ("", "")  # rank and size

    @classmethod
    def here(cls) -> Optional[Alone]:
        if any(variable not in os.environ for variable in cls.variables):
            return None
        size = _identity(cls.variables[1])
        if size == 1:
            return Alone()
        raise RondeError(
            f"this process was started by {cls.launcher} as one of {size} ({cls.variables[1]}={size}), from which ronde "
            "cannot start yet: start it with ronderun or torchrun, or give init() an mpi4py communicator"
        )


class _OpenMpi(_Unsupported):
    launcher = "Open MPI"
    variables = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")


class _Pmi(_Unsupported):
    launcher = "an MPI launcher (PMI)"
    variables = ("PMI_RANK", "PMI_SIZE")


class _Slurm(_Unsupported):
    launcher = "Slurm's srun"
    variables = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


KINDS: tuple[type[Alone], ...] = (Ronderun, Torchrun, _OpenMpi, _Pmi, _Slurm, Alone)


def find(comm: Any) -> tuple[Alone, tuple[int, ...]]:
    """The cluster that this process is in, and the ranks in it that form the job, in the order of their new numbers."""
    if comm is not None and hasattr(comm, "Get_rank"):
        cluster: Alone = Communicator(comm)
        return cluster, tuple(range(cluster.size))
    cluster = next(found for found in (kind.here() for kind in KINDS) if found is not None)
    if comm is None:
        return cluster, tuple(range(cluster.size))
    ranks = tuple(int(rank) for rank in comm)
    if not ranks:
        return cluster, tuple(range(cluster.size))
    if len(set(ranks)) != len(ranks) or min(ranks) < 0 or max(ranks) >= cluster.size:
        raise ArgumentError(f"init(comm={list(ranks)}): needs different ranks from 0 to {cluster.size - 1}")
    if cluster.rank not in ranks:
        raise ArgumentError(f"init(comm={list(ranks)}) was called by rank {cluster.rank}, which is not in it")
    return cluster, ranks


def connect(cluster: Alone, ranks: tuple[int, ...], generation: int, timeout: float) -> None:
    """Meets these ranks of the cluster and starts the process's engine."""
    index, count = ranks.index(cluster.rank), len(ranks)
    if count == 1:
        endpoint = _core.Endpoint(0, 1, generation=generation, host_name=cluster.host_name)
        endpoint.connect([endpoint.blob()], timeout)
        return
    deadline = time.monotonic() + timeout
    everybody = ranks == tuple(range(cluster.size))
    try:
        endpoint = _core.Endpoint(
            index,
            count,
            generation=generation,
            host_name=cluster.host_name,
            secret=cluster.secret(timeout),
            store_url=cluster.store_url if everybody else None,  # death/<rank> has the cluster's numbers
        )
        job = "init" if everybody else "init/" + "-".join(map(str, ranks))
        blobs = _exchange(cluster, ranks, f"{job}/{generation}", endpoint.blob(), deadline)
        endpoint.connect(blobs, max(deadline - time.monotonic(), 0.1))
    except _core.TimeoutError as error:
        raise _core.TimeoutError(f"init() gave up after {timeout:g} s (RONDE_START_TIMEOUT): {error}") from None
    finally:
        cluster.close()


def _exchange(cluster: Alone, ranks: tuple[int, ...], key: str, blob: bytes, deadline: float) -> list[bytes]:
    """The blobs of all ranks; TimeoutError names those that did not come, PeerLostError one that cannot come any more."""
    while True:
        left = deadline - time.monotonic()
        seconds = min(left, cluster.exchange_seconds)
        try:
            return cluster.exchange(key, ranks.index(cluster.rank), len(ranks), blob, seconds)
        except _core.TimeoutError as error:
            found = re.search(r"\d+ (?:ranks )?were expected[,;] missing: ([\d, ]+)$", str(error))
            if found is None:
                raise
        missing = [ranks[int(number)] for number in found[1].split(",")]
        for rank in missing:
            if (end := cluster.end_of(rank)) is not None:
                raise _core.PeerLostError(f"rank {rank} did not call init() and has ended: {end}")
        if seconds == left:
            names = ", ".join(map(str, missing))
            raise _core.TimeoutError(f"rank{'s' if len(missing) > 1 else ''} {names} did not call init()")


def _identity(variable: str) -> int:
    value = os.environ.get(variable)
    if value is None:
        raise ArgumentError(f"the environment has no {variable}, which the launcher should have set")
    try:
        return int(value)
    except ValueError:
        raise ArgumentError(f"{variable}={value!r} in the environment is not a number") from None


def _rank_and_size(rank_variable: str, size_variable: str) -> tuple[int, int]:
    rank, size = _identity(rank_variable), _identity(size_variable)
    if not 0 <= rank < size:
        raise ArgumentError(
            f"{rank_variable}={rank} and {size_variable}={size} in the environment: there is no rank {rank} of {size}"
        )
    return rank, size
