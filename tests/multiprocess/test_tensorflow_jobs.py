"""TensorFlow jobs under ronderun: sessions with hooks, checkpoints, ranks that leave, one thread."""

import os
import re
from pathlib import Path

import pytest
from launching import python, run

pytest.importorskip("tensorflow")

QUIET = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}

SCRIPT = """
import os, sys, time
import tensorflow as tf
import ronde.tensorflow as hvd
v1 = tf.compat.v1
v1.disable_eager_execution()
hvd.init()
rank = hvd.rank()
"""


def test_fewer_threads_than_operations() -> None:
    """In opposite order on the two ranks: an operation that kept TensorFlow's only thread would stop both."""
    code = SCRIPT + (
        "order = range(32) if rank else range(31, -1, -1)\n"
        "def build(x):\n"
        "    parts, before = {}, []\n"
        "    for n in order:\n"
        "        with tf.control_dependencies(before):\n"
        "            y = x + n\n"
        "        before = [y]\n"
        "        parts[n] = hvd.allreduce(y, op=hvd.Sum, name=f't{n}')\n"
        "    return [parts[n] for n in range(32)]\n"
        "config = v1.ConfigProto(inter_op_parallelism_threads=1)\n"
        "inside = tf.function(build)\n"
        "with v1.Session(config=config) as session:\n"
        "    for outputs in build(tf.constant(1.0)), inside(tf.constant(1.0)):\n"
        "        values = [float(value) for value in session.run(outputs)]\n"
        "        assert values == [2.0 * (1 + n) for n in range(32)], values\n"
        "print('passed')\n"
    )
    result = run("-np", "2", *python(code), env=QUIET, timeout=110)
    assert result.returncode == 0 and result.stdout.count("passed") == 2, result.stdout + result.stderr


def test_a_rank_that_leaves_before_the_broadcast() -> None:
    """K5: the other raises within 5 s, names it, and MonitoredTrainingSession does not try again."""
    code = SCRIPT + (
        "v1.get_variable('w', initializer=float(rank))\n"
        "v1.train.get_or_create_global_step()\n"
        "if rank == 0: sys.exit('boom')\n"
        "start = time.monotonic()\n"
        "try:\n"
        "    with v1.train.MonitoredTrainingSession(hooks=[hvd.BroadcastGlobalVariablesHook(0)]):\n"
        "        print('trains')\n"
        "except tf.errors.UnknownError as error:\n"
        "    print(f'raised after {time.monotonic() - start:.1f} s: {error.message}')\n"
    )
    result = run("-np", "2", *python(code), env=QUIET, timeout=110)
    found = re.search(r"raised after ([\d.]+) s: .*ronde \w+Error: rank 0", result.stdout, re.DOTALL)
    assert found and float(found[1]) < 5, result.stdout + result.stderr
    assert "trains" not in result.stdout


def test_a_restarted_job_goes_on_from_the_checkpoint_of_rank_0(tmp_path: Path) -> None:
    """K5: rank 0 restores, rank 1 is fresh; all are equal after the hook. The first run is killed in mid-training."""
    code = SCRIPT + (
        "limit, folder = int(sys.argv[1]), sys.argv[2]\n"
        "random = v1.get_variable('r', initializer=v1.random_uniform([3], seed=rank + int(time.time())))\n"
        "weight = v1.get_variable('w', initializer=0.0)\n"
        "step = v1.train.get_or_create_global_step()\n"
        "optimizer = hvd.DistributedOptimizer(v1.train.AdamOptimizer(0.1))\n"
        "train = optimizer.minimize((weight - rank) ** 2 + tf.reduce_sum(random) * 0, global_step=step)\n"
        "with tf.control_dependencies([train]):\n"
        "    after = step.read_value()\n"
        "every = hvd.allgather(tf.concat([random, [weight]], 0)[None])\n"
        "hooks = [hvd.BroadcastGlobalVariablesHook(0), v1.train.StopAtStepHook(last_step=limit)]\n"
        "with v1.train.MonitoredTrainingSession(\n"
        "    checkpoint_dir=folder if rank == 0 else None, save_checkpoint_steps=5, hooks=hooks\n"
        ") as session:\n"
        "    while not session.should_stop():\n"
        "        _, now, all_ranks = session.run([train, after, every])\n"
        "        assert (all_ranks[0] == all_ranks[1]).all(), all_ranks\n"
        "        print('step', int(now), 'r', all_ranks[0][:3].tolist(), flush=True)\n"
        "        if limit > 15 and now >= 12 and not os.path.exists(folder + '/second') and rank == 1:\n"
        "            os.kill(os.getpid(), 9)\n"
    )
    first = run("-np", "2", *python(code), "20", str(tmp_path), env=QUIET, timeout=110)
    assert first.returncode == 137, first.stdout + first.stderr
    (tmp_path / "second").touch()
    second = run("-np", "2", *python(code), "20", str(tmp_path), env=QUIET, timeout=110)
    assert second.returncode == 0, second.stdout + second.stderr
    steps = [int(number) for number in re.findall(r"^\[1\]<stdout>:step (\d+)", second.stdout, re.MULTILINE)]
    assert steps[0] == 11 and steps[-1] == 20, second.stdout
    restored = {text for text in re.findall(r"r (\[.*\])", first.stdout + second.stdout)}
    assert len(restored) == 1  # of the first run's rank 0, ever after
