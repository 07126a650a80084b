"""Starts groups of ranks: ronde with gloo, Open MPI, MPICH, and the memory limit; says why one is missing."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Optional

import limit
import turns

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build"
START_TIMEOUT = 90.0  # seconds
# One host, no network: what these libraries would do by themselves depends on the interfaces they find.
MPI_ENVIRONMENT = {
    "openmpi": {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,sm",
    },
    "mpich": {"HYDRA_IFACE": "lo", "FI_PROVIDER": "tcp"},
}
MPI_COMMAND = {
    "openmpi": ["mpirun", "--oversubscribe", "--bind-to", "none", "--allow-run-as-root", "-np"],
    "mpich": ["mpiexec", "-launcher", "fork", "-np"],
}


def mpi_folder(name: str) -> Path:
    """Where the Makefile puts an MPI and its mpi4py."""
    return BUILD / f"venv-{name}" / "bin"


def mpi_version(name: str) -> str:
    """What the MPI's own environment has installed, or "" when it is not there."""
    python = mpi_folder(name) / "python"
    script = f"import importlib.metadata as m; print(m.version('{name}'), 'mpi4py', m.version('mpi4py'))"
    try:
        done = subprocess.run([python, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def start_ronde(
    name: str, script: str, np: int, folder: Path, environment: Optional[dict[str, str]] = None
) -> turns.Group:
    """A group of ranks under ronderun that run a script of this folder."""
    command = [sys.executable, "-m", "ronde.launcher", "-np", str(np), sys.executable, str(HERE / script)]
    return turns.Group(name, command, np, folder, environment or {}, START_TIMEOUT)


def start(name: str, np: int, folder: Path) -> Any:
    """A group, or turns.Failure with the reason why there is none."""
    if name == "limit":
        return limit.Limit(np)
    if name == "ronde":
        return start_ronde(name, "ronde_rank.py", np, folder)
    bin_ = mpi_folder(name)
    if not (bin_ / MPI_COMMAND[name][0]).exists():
        raise turns.Failure("not installed (make bench-peers)")
    program, *options = MPI_COMMAND[name]
    command = [str(bin_ / program), *options, str(np), str(bin_ / "python"), str(HERE / "mpi_rank.py")]
    environment = {**MPI_ENVIRONMENT[name], "OMP_NUM_THREADS": "1", "PATH": f"{bin_}:{os.environ.get('PATH', '')}"}
    return turns.Group(name, command, np, folder, environment, START_TIMEOUT)
