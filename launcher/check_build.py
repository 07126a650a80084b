"""``ronderun --check-build``: what is there, and where the rest was looked for."""

from __future__ import annotations

import ctypes.util
import shutil
import sysconfig
from importlib import metadata
from pathlib import Path

from ronde import _core

_FRAMEWORKS = {
    "PyTorch": (("torch",), "ronde.torch"),
    "TensorFlow": (("tensorflow", "tensorflow-cpu"), None),
    "Keras": (("keras",), None),
    "MXNet": (("mxnet",), "ronde.mxnet"),
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
    for name, (packages, adapter) in _FRAMEWORKS.items():
        version = _version(packages)
        usable = bool(version) and adapter is not None
        note = version or "not installed"
        if version and adapter is None:
            note += ", no adapter in this release"
        lines.append(f"    [{'X' if usable else ' '}] {name} ({note})")
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
