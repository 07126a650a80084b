"""What must hold of the source tree and of what is built from it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import ronde

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(ronde._core.__file__).parent


def check_layers(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "check_layers.py", root], capture_output=True, text=True, timeout=60
    )


def test_includes_go_downwards_only(tmp_path: Path) -> None:
    assert check_layers(ROOT).returncode == 0
    shutil.copytree(ROOT / "core", tmp_path / "core")
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "architecture.md", tmp_path / "docs")
    (tmp_path / "core" / "base" / "planted.h").write_text('#pragma once\n#include "engine/engine.h"\n')
    result = check_layers(tmp_path)
    assert result.returncode == 1 and "core/base/planted.h:2: base may not include engine" in result.stdout


def test_no_source_includes_a_framework() -> None:
    pattern = re.compile(r'#\s*include\s*[<"](torch|ATen|c10|tensorflow|mxnet|numpy|jax|xla)[/.]')
    sources = [p for part in ("core", "adapters") for p in (ROOT / part).rglob("*") if p.suffix in (".h", ".cc")]
    assert len(sources) > 40 and any(p.name == "ops.cc" for p in sources)
    assert [p for p in sources if pattern.search(p.read_text())] == []


def test_libraries_export_only_our_names() -> None:
    for library, allowed in (
        (PACKAGE / "libronde.so", "ronde_"),
        (PACKAGE / "libronde_tensorflow.so", "ronde_"),
        (Path(ronde._core.__file__), "PyInit__core"),
    ):
        listing = subprocess.run(
            ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True, timeout=60
        )
        names = [line.split()[-1] for line in listing.stdout.splitlines()]
        assert names and [n for n in names if not n.startswith(allowed)] == []


def test_import_is_quick_and_brings_no_framework() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import ronde; took = time.perf_counter() - start;"
        "print(took, [m for m in ('torch', 'tensorflow', 'keras', 'mxnet', 'jax', 'numpy') if m in sys.modules])"
    )
    times = []
    for _ in range(5):
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        took, modules = result.stdout.split(" ", 1)
        assert modules.strip() == "[]"
        times.append(float(took))
    assert min(times) < 0.15


def test_torch_adapter_without_torch_names_it(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import ronde.torch"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    last = result.stderr.strip().splitlines()[-1]
    assert result.returncode == 1 and last.startswith("ImportError") and "torch" in last and "compil" not in last


def test_tensorflow_adapter_without_tensorflow_names_it(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("raise ModuleNotFoundError(\"No module named 'tensorflow'\")")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import ronde.tensorflow"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    last = result.stderr.strip().splitlines()[-1]
    assert result.returncode == 1 and last.startswith("ImportError") and "tensorflow" in last and "compil" not in last


def test_tensorflow_ops_say_what_they_miss() -> None:
    """The library loads anywhere and registers nothing where TensorFlow, or a function of it, is not there."""
    code = (
        "import ctypes, ronde; library = ctypes.CDLL(sys.argv[1]);"
        "library.ronde_tensorflow_error.restype = ctypes.c_char_p; print(library.ronde_tensorflow_error().decode())"
    )
    result = subprocess.run(
        [sys.executable, "-c", "import sys; " + code, PACKAGE / "libronde_tensorflow.so"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "libtensorflow_framework.so.2 is not loaded" in result.stdout, result.stderr


def test_importing_torch_first_or_last_both_work() -> None:
    for order in ("import torch, ronde.torch as hvd", "import ronde.torch as hvd, torch"):
        code = f"{order}; hvd.init(); print(hvd.allreduce(torch.ones(2)).tolist()); hvd.shutdown()"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
        assert result.stdout.strip() == "[1.0, 1.0]", result.stderr
