"""The command ``ronderun``: ``ronderun -np 4 python train.py``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import Any, Optional

from ronde import _core
from ronde.launcher.hosts import Host, HostError, parse_hostfile, parse_hosts
from ronde.launcher.job import Job, JobSpec, LaunchError

_LATER = {
    "mpi": "the MPI controller",
    "min_np": "elastic training",
    "max_np": "elastic training",
    "host_discovery_script": "elastic training",
    "slots_per_host": "elastic training",
    "timeline_filename": "the timeline",
    "autotune": "autotuning",
}


def option_destination(name: str) -> str:
    return "option_" + name


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ronderun", description="Starts a command on several ranks.", allow_abbrev=False, add_help=True
    )
    parser.add_argument("-v", "--version", action="version", version=_core.__version__)
    parser.add_argument("-np", "--num-proc", type=int, metavar="N", help="number of ranks")
    parser.add_argument("-H", "--hosts", help="hosts and their slots: host1:4,host2:2")
    parser.add_argument("-hostfile", "--hostfile", help="file with a line 'host slots=N' for each host")
    parser.add_argument("-cb", "--check-build", action="store_true", help="print what this installation can do")
    parser.add_argument("--output-filename", metavar="DIR", help="write output to DIR/rank.N/stdout and stderr")
    parser.add_argument(
        "-prefix-timestamp", "--prefix-timestamp", action="store_true", help="put the time before each line"
    )
    parser.add_argument("--verbose", action="store_true", help="say what is started")
    parser.add_argument("--config-file", metavar="YAML", help="options by section; flags win")
    parser.add_argument("--gloo", action="store_true", help="accepted: ronde's own controller is always used")
    parser.add_argument("--mpi", action="store_true", help=argparse.SUPPRESS)
    for name in ("min-np", "max-np", "slots-per-host", "host-discovery-script", "timeline-filename"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--autotune", action="store_true", help=argparse.SUPPRESS)
    groups: dict[str, Any] = {}
    for name, kind, _default, _scope, flag, _scale, section, text in _core.OPTIONS:
        if not flag:
            continue
        group = groups.setdefault(section, parser.add_argument_group(section))
        destination = option_destination(name)
        if kind == "Bool":
            group.add_argument(flag, dest=destination, action="store_const", const="1", help=text)
            if flag.startswith("--no-"):
                group.add_argument(
                    "--" + flag[5:], dest=destination, action="store_const", const="0", help=argparse.SUPPRESS
                )
        else:
            group.add_argument(flag, dest=destination, metavar="VALUE", help=text)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    return parser


def option_value(name: str, kind: str, scale: float, flag: str, text: str) -> str:
    """The environment's form of a flag's value. Raises LaunchError."""
    if kind == "Bool" or kind == "String":
        return text
    try:
        value = float(text) * scale
    except ValueError:
        raise LaunchError(f"{flag} must be a number, not '{text}'") from None
    return str(int(value)) if kind == "Int" else repr(value)


def read_config(path: str) -> dict[str, str]:
    """The options of a YAML config file, by name, in the environment's form. Raises LaunchError."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            sections = yaml.safe_load(file) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LaunchError(f"the config file {path} cannot be read: {error}") from None
    if not isinstance(sections, dict):
        raise LaunchError(f"the config file {path} must hold sections with options")
    rows = {(row[6], row[4].lstrip("-").replace("-", "_")): row for row in _core.OPTIONS if row[4]}
    values: dict[str, str] = {}
    for section, options in sections.items():
        if section == "controller":
            continue
        if not isinstance(options, dict):
            raise LaunchError(f"{path}: section '{section}' must hold options")
        for key, value in options.items():
            name = str(key).replace("-", "_")
            row = rows.get((section, name))
            if row is None:
                known = ", ".join(sorted(k for s, k in rows if s == section)) or "none"
                raise LaunchError(f"{path}: there is no option '{key}' in section '{section}' (there are: {known})")
            text = ("1" if value else "0") if isinstance(value, bool) else str(value)
            values[row[0]] = option_value(row[0], row[1], row[5], f"{path}: {key}", text)
    return values


def worker_environment(options: dict[str, str], local_ranks: int) -> dict[str, str]:
    env = dict(os.environ)
    for name, value in options.items():
        env["RONDE_" + name] = value
    env.setdefault("PYTHONUNBUFFERED", "1")
    # Frameworks take all cores each otherwise, and ranks slow each other down.
    env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // max(1, local_ranks))))
    return env


def find_hosts(hosts: Optional[str], hostfile: Optional[str], num_proc: Optional[int]) -> list[Host]:
    if hosts and hostfile:
        raise LaunchError("-H and -hostfile exclude each other")
    if hosts:
        return parse_hosts(hosts)
    if hostfile:
        return parse_hostfile(hostfile)
    return [Host("localhost", num_proc or 1)]


def run_job(job: Job) -> Any:
    """Runs it with INT, TERM and HUP ending it."""
    previous = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        previous[number] = signal.signal(number, lambda n, _: job.stop(n))
    try:
        return job.run()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def main(arguments: Optional[list[str]] = None) -> int:
    parser = build_parser()
    args = parser.parse_args(arguments)
    try:
        if args.check_build:
            from ronde.launcher.check_build import report

            print(report())
            return 0
        for name, what in _LATER.items():
            if getattr(args, name):
                raise LaunchError(f"--{name.replace('_', '-')}: {what} is not available in this release")
        command = args.command[1:] if args.command[:1] == ["--"] else args.command
        if not command:
            raise LaunchError("no command was given: ronderun -np 4 python train.py")
        if args.num_proc is not None and args.num_proc < 1:
            raise LaunchError(f"-np must be at least 1, not {args.num_proc}")
        hosts = find_hosts(args.hosts, args.hostfile, args.num_proc)
        num_proc = args.num_proc or sum(host.slots for host in hosts)
        options = read_config(args.config_file) if args.config_file else {}
        for name, kind, _default, _scope, flag, scale, _section, _help in _core.OPTIONS:
            given = getattr(args, option_destination(name), None)
            if given is not None:
                options[name] = option_value(name, kind, scale, flag, given)
        job = Job(
            JobSpec(
                command=command,
                num_proc=num_proc,
                hosts=hosts,
                env=worker_environment(options, num_proc),
                output_directory=args.output_filename,
                timestamps=args.prefix_timestamp,
                verbose=args.verbose,
            )
        )
        outcome = run_job(job)
    except (LaunchError, HostError) as error:
        print(f"ronderun: {error}", file=sys.stderr)
        return 2
    if outcome.error:
        print(f"ronderun: {outcome.error}", file=sys.stderr)
    return int(outcome.code)


if __name__ == "__main__":
    sys.exit(main())
