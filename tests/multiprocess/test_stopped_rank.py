"""A rank that stops moving in the middle of an exchange (SIGSTOP: its engine's threads too) is an error, not a hang."""

from __future__ import annotations

import os
import sys

import pytest
from launching import run

CODE = """
import os, signal, threading, time, numpy as np, ronde as hvd
hvd.init()
pid = int(hvd.allgather(np.array([os.getpid()]))[1])
if hvd.rank() == 0:
    def stop():
        time.sleep(0.5); os.kill(pid, signal.SIGSTOP); time.sleep(4); os.kill(pid, signal.SIGCONT)
    threading.Thread(target=stop).start()
x = np.ones(8_000_000, np.float32)
begin = time.monotonic()
try:
    while time.monotonic() - begin < 30: hvd.allreduce_(x, op=hvd.Max, name='x')
except hvd.RondeError as error:
    print('SAW', hvd.rank(), type(error).__name__, round(time.monotonic() - begin, 1), error, flush=True)
"""


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_stopped_rank_is_named_within_the_stall_limit(transport: str) -> None:
    result = run(
        "-np",
        "2",
        "--stall-check-shutdown-time-seconds",
        "2",
        sys.executable,
        "-c",
        CODE,
        env={**os.environ, "RONDE_TRANSPORT": transport},
    )
    seen = {line.split()[1]: line for line in result.stdout.splitlines() if "SAW" in line}
    assert sorted(seen) == ["0", "1"], result
    assert "StallError" in seen["0"] and "allreduce 'x'" in seen["0"] and "rank 1" in seen["0"], seen
    assert float(seen["0"].split()[3]) < 3.5
    assert seen["0"].split()[4:] == seen["1"].split()[4:]
