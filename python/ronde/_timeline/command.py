"""``ronde timeline FILE...``."""

from __future__ import annotations

import argparse
import sys

from ronde._timeline.plot import plot
from ronde._timeline.summary import summarise
from ronde._timeline.text import render
from ronde._timeline.trace import TraceError, read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="timelines of one job, rank 0's first of all")
    parser.add_argument("--tensors", type=int, default=10, metavar="N", help="how many of the slowest tensors [10]")
    parser.add_argument("--plot", metavar="PNG", help="also draw some steps (needs matplotlib)")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="how many steps to draw [5]")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        traces = [read(path) for path in args.files]
        ranks = [trace.rank for trace in traces]
        if len(set(ranks)) < len(ranks):
            raise TraceError("two of the files are of one rank: give the timelines of one job")
        summary = summarise(traces)
        print(render(summary, max(args.tensors, 0)))
        if args.plot is not None:
            plot(summary, args.plot, max(args.steps, 1))
    except TraceError as error:
        print(f"ronde: {error}", file=sys.stderr)
        return 2
    return 0
