"""What ronde costs when it does nothing: size of the wheel, memory added by init(), processor time of an idle rank.

Memory is that of one rank, without the shared segment, which belongs to all ranks of the host. Idle processor time is
taken over 5 s after a first allreduce, over all threads of the rank; the worst rank counts.

    python benchmarks/footprint.py [-np 2] [--wheel FILE] [--json] [--check]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Optional

import ranks

ROOT = Path(__file__).resolve().parent.parent
IDLE_SECONDS = 5.0
# name -> (unit, limit)
LIMITS = {"wheel": ("MB", 5.0), "init memory": ("MB", 20.0), "idle processor": ("%", 1.0)}


def resident() -> tuple[float, float]:
    """Resident MB of this process: private and file-backed memory, shared memory."""
    fields = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Rss"):
            key, value = line.split(":")
            fields[key] = int(value.split()[0]) * 1024 / 1e6
    return fields["RssAnon"] + fields["RssFile"], fields["RssShmem"]


def work() -> None:
    import numpy as np

    import ronde

    before = resident()
    ronde.init()
    after = resident()
    total = ronde.allreduce(np.full(1024, ronde.rank() + 1, np.float32), op=ronde.Sum, name="first")
    assert (total == sum(range(1, ronde.size() + 1))).all(), total
    time.sleep(0.5)
    wall, processor = time.monotonic(), time.process_time()
    time.sleep(IDLE_SECONDS)
    idle = (time.process_time() - processor) / (time.monotonic() - wall) * 100
    ranks.report(
        ronde.rank(),
        {"init memory": after[0] - before[0], "shared segment": after[1] - before[1], "idle processor": idle},
    )
    ronde.shutdown()


def wheel_megabytes(wheel: Optional[Path]) -> float:
    """Size of the wheel: the file given, else one built now from this tree."""
    if wheel:
        return wheel.stat().st_size / 1e6
    with tempfile.TemporaryDirectory(prefix="ronde-wheel-") as folder:
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, str(ROOT)]
        try:
            import scikit_build_core  # type: ignore[import-not-found]  # noqa: F401

            command.insert(-1, "--no-build-isolation")
        except ImportError:
            pass  # pip fetches it
        subprocess.run(command, check=True, timeout=900)
        (built,) = Path(folder).glob("*.whl")
        return built.stat().st_size / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-np", type=int, default=2, help="ranks [2]")
    parser.add_argument("--wheel", type=Path, help="a wheel that was built already")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a limit is missed")
    arguments = parser.parse_args()
    if ranks.worker_folder():
        work()
        return
    results = ranks.start(__file__, arguments.np, [], timeout=120)
    values: dict[str, Any] = {name: max(result[name] for result in results) for name in results[0]}
    values["wheel"] = wheel_megabytes(arguments.wheel)
    missed = [name for name, (_, limit) in LIMITS.items() if values[name] >= limit]
    if arguments.json:
        limits = {name: limit for name, (_, limit) in LIMITS.items()}
        print(
            json.dumps({"np": arguments.np, "machine": ranks.machine(), "values": values, "limits": limits}, indent=1)
        )
    else:
        for name, (unit, limit) in LIMITS.items():
            print(f"{name:>16} {values[name]:8.2f} {unit:<2} (< {limit:g} {unit})" + "  MISSED" * (name in missed))
        print(
            f"{'shared segment':>16} {values['shared segment']:8.2f} MB (touched by init, shared by the host's ranks)"
        )
    if arguments.check and missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
