"""MXNet jobs under ronderun: the order of imports and init(), the ends of ranks, environments that cannot work."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from launching import python, run

needs_mxnet = pytest.mark.skipif(
    find_spec("mxnet") is None, reason="mxnet is not installed: see requirements/mxnet.txt"
)


@needs_mxnet
@pytest.mark.parametrize("first", ["import mxnet", "import ronde; ronde.init(); import mxnet"])
def test_init_before_and_after_the_import(first: str) -> None:
    code = (
        f"{first}\n"
        "import ronde.mxnet as hvd\n"
        "import mxnet as mx\n"
        "hvd.init()\n"
        "print(hvd.allreduce(mx.nd.ones((2,)) * hvd.rank(), op=hvd.Sum).asnumpy().tolist())\n"
        "store = mx.kv.create('dist_ronde')\n"
        "assert (store.rank, store.num_workers) == (hvd.rank(), 2)\n"
    )
    result = run("-np", "2", *python(code))
    assert result.returncode == 0 and result.stdout.count("[1.0, 1.0]") == 2, result.stdout + result.stderr


@needs_mxnet
@pytest.mark.parametrize("last", ["hvd.shutdown()", "pass"])
def test_a_rank_that_ends_without_looking_at_its_results(last: str) -> None:
    """The other one still gets them."""
    code = (
        "import time\n"
        "import mxnet as mx\n"
        "import ronde.mxnet as hvd\n"
        "hvd.init()\n"
        "x = mx.nd.ones((1000, 1000))\n"
        "for _ in range(4):\n"
        "    x = mx.nd.dot(x, x) / 1000\n"
        "if hvd.rank() == 1: time.sleep(1)\n"
        "for _ in range(20):\n"
        "    hvd.allreduce_(x)\n"
        "if hvd.rank() == 1: print('got', x[0, 0].asscalar())\n"
        f"{last}\n"
    )
    result = run("-np", "2", *python(code))
    assert result.returncode == 0 and "got" in result.stdout, result.stdout + result.stderr


@needs_mxnet
def test_a_rank_that_raises() -> None:
    code = (
        "import time\n"
        "import mxnet as mx\n"
        "import ronde.mxnet as hvd\n"
        "hvd.init()\n"
        "if hvd.rank() == 1: raise ValueError('boom')\n"
        "start = time.monotonic()\n"
        "try:\n"
        "    hvd.allreduce(mx.nd.ones((2,))).wait_to_read()\n"
        "except hvd.PeerLostError as error:\n"
        "    print(f'after {time.monotonic() - start:.0f} s: {error}')\n"
    )
    result = run("-np", "2", *python(code))
    assert "rank 1" in result.stdout and "ValueError: boom" in result.stdout, result.stdout + result.stderr


@needs_mxnet
def test_a_rank_that_is_late() -> None:
    """C1: with the limit that the user has set, the wait ends with the tensor's name."""
    code = (
        "import os, time\n"
        "import mxnet as mx\n"
        "import ronde.mxnet as hvd\n"
        "hvd.init()\n"
        "if hvd.rank() == 1: time.sleep(8)\n"
        "try:\n"
        "    hvd.allreduce(mx.nd.ones((2,)), name='late').wait_to_read()\n"
        "except hvd.StallError as error:\n"
        "    print(error)\n"
    )
    options = ("--stall-check-warning-time-seconds", "1", "--stall-check-shutdown-time-seconds", "3")
    result = run("-np", "2", *options, *python(code))
    assert "'late'" in result.stdout and "rank 1" in result.stdout, result.stdout + result.stderr


def import_error(folder: Path, module: str) -> str:
    """What `import ronde.mxnet` says where `import mxnet` does what the module's text does."""
    (folder / "mxnet.py").write_text(module)
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); import ronde.mxnet"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ronde.mxnet needs MXNet"), result.stderr
    return last


def test_without_mxnet(tmp_path: Path) -> None:
    last = import_error(tmp_path, "raise ModuleNotFoundError(\"No module named 'mxnet'\")")
    assert "pip install mxnet==1.9.1 numpy==1.23.5" in last


def test_with_a_numpy_that_is_too_new(tmp_path: Path) -> None:
    """MXNet itself says what NumPy says: no word of which NumPy works."""
    last = import_error(tmp_path, "raise AttributeError(\"module 'numpy' has no attribute 'bool'.\\nmore\")")
    assert "pip install numpy==1.23.5" in last
