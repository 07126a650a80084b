"""The examples on 2 ranks: each reaches its accuracy, and the ranks end with the same weights."""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from launching import run

EXAMPLES = Path(__file__).parents[2] / "examples"
# Script, what it needs, its environment, accuracy in per cent.
ROWS = [
    ("torch_mnist.py", "torch", {}, 96),
    ("tensorflow1_mnist.py", "tensorflow", {}, 95),
    ("tensorflow2_mnist.py", "tensorflow", {}, 95),
    ("tensorflow2_keras_mnist.py", "tensorflow", {}, 96),
    ("tensorflow2_keras_mnist.py", "tf_keras", {"TF_USE_LEGACY_KERAS": "1"}, 96),
    ("keras_mnist.py", "tensorflow", {"KERAS_BACKEND": "tensorflow"}, 96),
    ("keras_mnist.py", "torch", {"KERAS_BACKEND": "torch"}, 96),
    ("keras_mnist.py", "jax", {"KERAS_BACKEND": "jax"}, 96),
    ("mxnet_mnist.py", "mxnet", {}, 95),
    ("mxnet_kvstore_mnist.py", "mxnet", {}, 95),
    ("mxnet_kvstore_mnist.py --module", "mxnet", {}, 95),
]


@pytest.mark.parametrize(
    ("script", "needs", "environment", "least"), ROWS, ids=[f"{script}-{needs}" for script, needs, _, _ in ROWS]
)
def test_accuracy_and_equal_weights(script: str, needs: str, environment: dict[str, str], least: float) -> None:
    for module in {"mlxtend", needs, *(["keras"] if "keras" in script else [])}:
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", **environment}
    result = run("-np", "2", sys.executable, *str(EXAMPLES / script).split(), env=env, timeout=115)
    assert result.returncode == 0, result.stderr
    weights = re.findall(r"weights (\w+)", result.stdout)
    assert len(weights) == 2 and len(set(weights)) == 1, result.stdout
    accuracy = re.search(r"accuracy ([\d.]+) %", result.stdout)
    assert accuracy and float(accuracy[1]) >= least, result.stdout
