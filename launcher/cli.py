"""The command ``ronderun``: ``ronderun -np 4 python train.py``."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import Any, Optional

from ronde import _core
from ronde.launcher.errors import LaunchError
from ronde.launcher.hosts import Host, HostError, parse_hostfile, parse_hosts
from ronde.launcher.job import Job, JobSpec, Outcome
from ronde.launcher.options import option_value, read_config, worker_environment
from ronde.launcher.ssh import Ssh

# Flags that scripts pass: what they ask for comes later. "=": with a value; "no": has a form --no-..., which asks for
# nothing.
_LATER = (
    ("mpi", "", "the MPI controller"),
    ("mpi-args", "=", "the MPI controller"),
    ("tcp", "", "the MPI controller"),
    ("binding-args", "=", "the MPI controller"),
    ("mpi-threads-disable", "no", "the MPI controller"),
    ("hierarchical-allreduce", "no", "a choice of the algorithm"),
    ("hierarchical-allgather", "no", "a choice of the algorithm"),
    ("torus-allreduce", "no", "a choice of the algorithm"),
    ("num-nccl-streams", "=", "NCCL"),
    ("thread-affinity", "=", "thread affinity"),
    ("autotune", "no", "autotuning"),
    ("autotune-log-file", "=", "autotuning"),
    ("autotune-warmup-samples", "=", "autotuning"),
    ("autotune-steps-per-sample", "=", "autotuning"),
    ("autotune-bayes-opt-max-samples", "=", "autotuning"),
    ("autotune-gaussian-process-noise", "=", "autotuning"),
    ("min-np", "=", "elastic training"),
    ("min-num-proc", "=", "elastic training"),
    ("max-np", "=", "elastic training"),
    ("max-num-proc", "=", "elastic training"),
    ("slots-per-host", "=", "elastic training"),
    ("elastic-timeout", "=", "elastic training"),
    ("reset-limit", "=", "elastic training"),
    ("blacklist-cooldown-range", "=", "elastic training"),
    ("host-discovery-script", "=", "elastic training"),
)
# Other spellings.
_ALSO = {"--network-interfaces": ("--network-interface",)}
_HIDDEN = argparse.SUPPRESS


def _option_destination(name: str) -> str:
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
    parser.add_argument("--disable-cache", action="store_true", help="accepted: start-up checks are never cached")
    group = parser.add_argument_group("other hosts")
    group.add_argument("-p", "--ssh-port", type=int, metavar="PORT", help="port of the other hosts' ssh")
    group.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="key for ssh")
    group.add_argument("--python", metavar="PATH", help="Python of ronde on the other hosts; else this one's path")
    flags = set(_add_table(parser))
    for name, form, _what in _LATER:
        if f"--{name}" in flags:
            continue
        destination = "later_" + name
        if form == "=":
            parser.add_argument(f"--{name}", dest=destination, nargs="+" if "range" in name else None, help=_HIDDEN)
        else:
            parser.add_argument(f"--{name}", dest=destination, action="store_true", help=_HIDDEN)
        if form == "no":
            parser.add_argument(f"--no-{name}", dest=destination, action="store_false", help=_HIDDEN)
        parser.set_defaults(**{destination: None})
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    return parser


def _add_table(parser: argparse.ArgumentParser) -> list[str]:
    """The flags of the option table."""
    flags = []
    groups: dict[str, Any] = {}
    for name, kind, _default, _scope, flag, scale, section, text in _core.OPTIONS:
        if not flag:
            continue
        flags.append(flag)
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        group = groups[section]
        destination = _option_destination(name)
        if kind != "Bool":
            text += f" Here in units of {scale:.0f}." if scale != 1 else ""
            names = [flag, *_ALSO.get(flag, ())]
            group.add_argument(*names, dest=destination, metavar="VALUE", help=text.replace("%", "%%"))
            continue
        group.add_argument(flag, dest=destination, action="store_const", const="1", help=text.replace("%", "%%"))
        if flag.startswith("--no-"):
            opposite = "--" + flag[5:]
        elif "-without-" in flag:
            opposite = flag.replace("-without-", "-with-")
        else:
            opposite = "--no-" + flag[2:]
        group.add_argument(opposite, dest=destination, action="store_const", const="0", help=_HIDDEN)
    return flags


def find_hosts(hosts: Optional[str], hostfile: Optional[str], num_proc: Optional[int]) -> list[Host]:
    if hosts is not None and hostfile is not None:
        raise LaunchError("-H and -hostfile exclude each other")
    if hosts is not None:
        return parse_hosts(hosts)
    if hostfile is not None:
        return parse_hostfile(hostfile)
    return [Host("localhost", num_proc or 1)]


def run_job(job: Job) -> Outcome:
    """Runs it with INT, TERM and HUP ending it, where they are not ignored (nohup)."""
    previous = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            previous[number] = signal.signal(number, lambda n, _: job.stop(n))
    try:
        return job.run()
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _make_job(args: argparse.Namespace) -> Job:
    for name, _form, what in _LATER:
        if getattr(args, "later_" + name, None):
            raise LaunchError(f"--{name}: {what} is not available in this release")
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise LaunchError("no command was given: ronderun -np 4 python train.py")
    if args.num_proc is not None and args.num_proc < 1:
        raise LaunchError(f"-np must be at least 1, not {args.num_proc}")
    hosts = find_hosts(args.hosts, args.hostfile, args.num_proc)
    num_proc = args.num_proc or sum(host.slots for host in hosts)
    options = read_config(args.config_file) if args.config_file is not None else {}
    for name, kind, default, _scope, flag, scale, _section, _help in _core.OPTIONS:
        given = getattr(args, _option_destination(name), None)
        if given is not None:
            options[name] = option_value(kind, default, scale, flag, given)
    return Job(
        JobSpec(
            command=command,
            num_proc=num_proc,
            hosts=hosts,
            env=worker_environment(options),
            output_directory=args.output_filename,
            timestamps=args.prefix_timestamp,
            verbose=args.verbose,
            ssh=Ssh(args.ssh_port, args.ssh_identity_file, args.python),
        )
    )


def main(arguments: Optional[list[str]] = None) -> int:
    args = build_parser().parse_args(arguments)
    try:
        if args.check_build:
            from ronde.launcher.check_build import report

            print(report())
            return 0
        outcome = run_job(_make_job(args))
    except (LaunchError, HostError) as error:
        print(f"ronderun: {error}", file=sys.stderr)
        return 2
    if outcome.error:
        print(f"ronderun: {outcome.error}", file=sys.stderr)
    return outcome.code


if __name__ == "__main__":
    sys.exit(main())
