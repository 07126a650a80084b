"""``ronderun --check-build``: what is there, and where the rest was looked for."""

from __future__ import annotations

import ctypes.util
import shutil
import sysconfig
from importlib import metadata
from pathlib import Path

from ronde import _core

# By the names of their distributions.
_FRAMEWORKS = {
    "PyTorch": ("torch",),
    "TensorFlow": ("tensorflow", "tensorflow-cpu"),
    "Keras": ("keras", "tf_keras"),
    "JAX, for Keras": ("jax",),
    "MXNet": ("mxnet",),
}


def _version(packages: tuple[str, ...]) -> str:
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return ""


def report() -> str:
    lines = [f"ronde v{_core.__version__}:", "", "Frameworks:"]
    for name, packages in _FRAMEWORKS.items():
        version = _version(packages)
        lines.append(f"    [{'X' if version else ' '}] {name} ({version or 'not installed'})")
    nccl = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    found_nccl = str(nccl) if nccl.exists() else ctypes.util.find_library("nccl") or ""
    mpi = shutil.which("mpicxx") or ""
    lines += [
        "",
        "Backends for tensors:",
        "    [X] host (shared memory, TCP)",
        f"    [ ] MPI ({'found ' + mpi if mpi else 'looked for mpicxx on PATH'}; not available in this release)",
        f"    [ ] NCCL ({'found ' + found_nccl if found_nccl else f'looked for {nccl} and in the loader path'}; not available in this release)",
        "",
        "Controllers:",
        "    [X] ronde (also asked for as gloo)",
        "    [ ] MPI (not available in this release)",
    ]
    return "\n".join(lines)
