"""``ronde.run``: a function on several ranks, from within a program."""

from __future__ import annotations

import pickle
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

from ronde.launcher import frames
from ronde.launcher.cli import find_hosts, run_job
from ronde.launcher.errors import LaunchError
from ronde.launcher.job import Job, JobSpec, Outcome
from ronde.launcher.options import option_value, worker_environment
from ronde.launcher.processes import python_command
from ronde.launcher.ssh import Ssh


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Optional[Mapping[str, Any]] = None,
    num_proc: Optional[int] = None,
    np: Optional[int] = None,
    hosts: Optional[str] = None,
    hostfile: Optional[str] = None,
    start_timeout: Optional[float] = None,
    output_filename: Optional[str] = None,
    verbose: bool = False,
    env: Optional[Mapping[str, str]] = None,
    use_gloo: Optional[bool] = None,
    use_mpi: Optional[bool] = None,
    prefix_output_with_timestamp: bool = False,
    disable_cache: Optional[bool] = None,
    network_interfaces: Optional[str] = None,
    ssh_port: Optional[int] = None,
    ssh_identity_file: Optional[str] = None,
    executable: Optional[str] = None,
) -> list[Any]:
    """Calls ``func(*args, **kwargs)`` on every rank of a new job and returns the results by rank.

    ``func`` and its arguments travel by cloudpickle; it calls ``init()`` itself. ``num_proc`` (or ``np``): number of ranks,
    else all slots of ``hosts``. ``env``: variables added to the workers' environment. ``executable``: the workers' Python.
    The others are options of ``ronderun``.
    Raises RuntimeError that names the first rank that failed and what it raised.
    """
    import cloudpickle

    if use_mpi:
        raise LaunchError("use_mpi: the MPI controller is not available in this release")
    if num_proc is not None and np is not None and num_proc != np:
        raise ValueError(f"num_proc ({num_proc}) and np ({np}) differ; give one")
    asked = num_proc if num_proc is not None else np
    if asked is not None and (isinstance(asked, bool) or not hasattr(asked, "__index__")):
        raise TypeError(f"num_proc (or np) must be a whole number, not {asked!r}")
    if asked is not None and asked < 1:
        raise ValueError(f"num_proc must be at least 1, not {asked}")
    places = find_hosts(hosts, hostfile, asked)
    count = int(asked) if asked is not None else sum(host.slots for host in places)
    options = {}
    if start_timeout is not None:
        options["START_TIMEOUT"] = option_value("Double", "0", 1, "start_timeout", str(start_timeout))
    if network_interfaces is not None:
        options["NETWORK_INTERFACES"] = network_interfaces
    environment = worker_environment(options)
    environment.update(env or {})
    task = cloudpickle.dumps((func, tuple(args), dict(kwargs or {})))
    if len(task) > frames.PAYLOAD_LIMIT:
        raise ValueError(f"the function and its arguments have {len(task)} bytes; the limit is {frames.PAYLOAD_LIMIT}")
    spec = JobSpec(
        # With the same module path: the function's module is found there as it was here.
        command=[executable or sys.executable, *python_command("ronde.launcher.task")[1:]],
        num_proc=count,
        hosts=places,
        env=environment,
        output_directory=output_filename,
        timestamps=prefix_output_with_timestamp,
        verbose=verbose,
        task=task,
        ssh=Ssh(ssh_port, ssh_identity_file, executable),
    )
    job = Job(spec)
    outcome = run_job(job) if threading.current_thread() is threading.main_thread() else job.run()
    if job.signal is not None:
        signal.raise_signal(job.signal)  # for the program's own handler; INT is a KeyboardInterrupt
    return _results(outcome, count)


def _results(outcome: Outcome, count: int) -> list[Any]:
    """By rank; RuntimeError that names a rank if one has none."""
    values, raised = {}, {}
    for rank, value in sorted(outcome.results.items()):
        try:
            ok, values[rank] = pickle.loads(value)
        except Exception as error:
            ok, values[rank] = False, f"its result cannot be unpickled here: {type(error).__name__}: {error}"
        if not ok:
            raised[rank] = values[rank]
    if raised and outcome.rank in (None, *raised):
        rank = min(raised) if outcome.rank is None else outcome.rank
        raise RuntimeError(f"rank {rank} failed:\n{raised[rank]}")
    missing = [str(rank) for rank in range(count) if rank not in values]
    if outcome.code or missing:
        without = f" without a result of rank {', '.join(missing)}" if missing else ""
        raise RuntimeError(outcome.error or f"the job ended with code {outcome.code}{without}")
    return [values[rank] for rank in range(count)]
