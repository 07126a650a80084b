"""The command ``ronde``: tools beside a job. (Jobs are started with ``ronderun``.)"""

from __future__ import annotations

import argparse
from typing import Optional

from ronde import _core
from ronde._timeline import command as timeline


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="ronde", description="Tools for jobs of ronde's.", allow_abbrev=False)
    parser.add_argument("-v", "--version", action="version", version=_core.__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    timeline.add_arguments(
        commands.add_parser("timeline", help="say where the time of a recorded job went", allow_abbrev=False)
    )
    args = parser.parse_args(arguments)
    return int(args.run(args))
