"""Starts a benchmark's own ranks and collects what they measured.

A benchmark is one file with two lives: started by hand it calls `start`, which runs the same file as `np` ranks under
ronderun; there it finds itself to be a worker (`worker_folder`) and leaves its numbers with `report`.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Optional

_FOLDER = "RONDE_BENCHMARK_FOLDER"


def worker_folder() -> Optional[Path]:
    """A folder that all ranks share, when this process is a rank; else None."""
    folder = os.environ.get(_FOLDER)
    return Path(folder) if folder else None


def report(rank: int, result: Any) -> None:
    """Leaves a rank's result for the process that started it."""
    folder = worker_folder()
    assert folder is not None, "report() is for ranks"
    (folder / f"rank{rank}.json").write_text(json.dumps(result))


def start(script: str, np: int, arguments: list[str], timeout: float) -> list[Any]:
    """Runs the script on `np` ranks of this host for at most `timeout` seconds: their results by rank."""
    with tempfile.TemporaryDirectory(prefix="ronde-bench-") as folder:
        command = [sys.executable, "-m", "ronde.launcher", "-np", str(np), sys.executable, script, *arguments]
        done = subprocess.run(command, env={**os.environ, _FOLDER: folder}, timeout=timeout, check=False)
        if done.returncode != 0:
            sys.exit(f"{Path(script).name}: the ranks ended with code {done.returncode}: {' '.join(command)}")
        return [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(np)]


def machine() -> dict[str, Any]:
    """What a reader needs to know to judge the numbers."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "affinity": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }
