"""``ronde.run``: a function on several ranks, from within a program."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

from ronde.launcher.cli import find_hosts, run_job, worker_environment
from ronde.launcher.job import Job, JobSpec, LaunchError


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
) -> list[Any]:
    """Calls ``func(*args, **kwargs)`` on every rank of a new job and returns the results by rank.

    ``func`` and its arguments travel by cloudpickle; it calls ``init()`` itself. ``num_proc`` (or ``np``): number of ranks,
    else all slots of ``hosts``. ``env``: variables added to the workers' environment. Raises RuntimeError that names the
    first rank that failed and what it raised.
    """
    import cloudpickle

    if use_mpi:
        raise LaunchError("use_mpi: the MPI controller is not available in this release")
    if num_proc is not None and np is not None and num_proc != np:
        raise ValueError(f"num_proc ({num_proc}) and np ({np}) differ; give one")
    count = num_proc if num_proc is not None else np
    if count is not None and count < 1:
        raise ValueError(f"num_proc must be at least 1, not {count}")
    places = find_hosts(hosts, hostfile, count)
    count = count or sum(host.slots for host in places)
    options = {} if start_timeout is None else {"START_TIMEOUT": str(start_timeout)}
    environment = worker_environment(options, count)
    environment.update(env or {})
    # The function's module must be found in the workers as it is here.
    paths = [path or os.getcwd() for path in sys.path]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    spec = JobSpec(
        command=[sys.executable, "-m", "ronde.launcher.task"],
        num_proc=count,
        hosts=places,
        env=environment,
        output_directory=output_filename,
        timestamps=prefix_output_with_timestamp,
        verbose=verbose,
        task=cloudpickle.dumps((func, tuple(args), dict(kwargs or {}))),
    )
    import threading

    job = Job(spec)
    outcome = run_job(job) if threading.current_thread() is threading.main_thread() else job.run()
    results = {rank: pickle.loads(value) for rank, value in outcome.results.items()}
    raised = {rank: text for rank, (ok, text) in results.items() if not ok}
    if raised:
        rank = outcome.rank if outcome.rank in raised else min(raised)
        raise RuntimeError(f"rank {rank} failed:\n{raised[rank]}")
    if outcome.code or len(results) < count:
        raise RuntimeError(outcome.error or f"the job ended with code {outcome.code}")
    return [results[rank][1] for rank in range(count)]
