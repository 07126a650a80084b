"""From ronderun's flags and config files to the ranks' environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from ronde import _core
from ronde.launcher.cli import _LATER, build_parser, main
from ronde.launcher.errors import LaunchError
from ronde.launcher.options import option_value, read_config, worker_environment


@pytest.mark.parametrize(
    ("kind", "scale", "text", "value"),
    [
        ("Int", 1048576, "64", "67108864"),
        ("Int", 1048576, "0.5", "524288"),
        ("Int", 1, "12", "12"),
        ("Double", 1, "2.5", "2.5"),
        ("Bool", 1, "True", "1"),
        ("Bool", 1, "off", "0"),
        ("String", 1, "info", "info"),
    ],
)
def test_values(kind: str, scale: float, text: str, value: str) -> None:
    assert option_value(kind, "0", scale, "--x", text) == value


@pytest.mark.parametrize(
    ("kind", "text"), [("Int", "1.5"), ("Int", "inf"), ("Int", "nan"), ("Double", "nan"), ("Double", ""), ("Bool", "2")]
)
def test_bad_values_are_refused_with_the_flag(kind: str, text: str) -> None:
    with pytest.raises(LaunchError, match="--some-flag must be .*, not"):
        option_value(kind, "0", 1, "--some-flag", text)


@pytest.mark.parametrize(("kind", "text"), [("Int", "-1"), ("Double", "-0.5")])
def test_values_below_zero_are_for_options_that_may_be_unset(kind: str, text: str) -> None:
    assert float(option_value(kind, "-1", 1, "--some-flag", text)) == float(text)
    with pytest.raises(LaunchError, match=f"--some-flag must not be negative, but is '{text}'"):
        option_value(kind, "0", 1, "--some-flag", text)


@pytest.mark.parametrize("value", ["-5", "nan", "inf", "soon"])
def test_a_start_timeout_that_is_none_is_refused_by_name(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    import ronde

    assert main(["-np", "1", "--start-timeout", value, "true"]) == 2
    assert "ronderun: --start-timeout must" in capsys.readouterr().err
    with pytest.raises(LaunchError, match="start_timeout must"):
        ronde.run(print, np=1, start_timeout=value)  # type: ignore[arg-type]


def test_every_option_of_the_table_has_its_flag() -> None:
    for name, kind, _, _, flag, _, _, _ in _core.OPTIONS:
        if flag:
            words = [flag] if kind == "Bool" else [flag, "7"]
            args = build_parser().parse_args([*words, "train.py", flag, "x"])
            assert getattr(args, f"option_{name}") == ("1" if kind == "Bool" else "7")
            assert args.command == ["train.py", flag, "x"]  # what follows the command is the command's


def test_flags_have_opposites_and_the_last_one_counts() -> None:
    args = build_parser().parse_args(["--no-stall-check", "--stall-check", "--log-without-timestamp", "x"])
    assert (args.option_STALL_CHECK_DISABLE, args.option_LOG_HIDE_TIME) == ("0", "1")
    args = build_parser().parse_args(["--stall-check", "--no-stall-check", "--log-with-timestamp", "x"])
    assert (args.option_STALL_CHECK_DISABLE, args.option_LOG_HIDE_TIME) == ("1", "0")


@pytest.mark.parametrize(("name", "form", "what"), _LATER)
def test_what_comes_later_is_refused_by_name(
    name: str, form: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-np", "1", f"--{name}", *(["1"] if form == "=" else []), "--gloo", "true"]) == 2
    assert capsys.readouterr().err == f"ronderun: --{name}: {what} is not available in this release\n"


def test_flags_of_other_hosts_are_understood() -> None:
    words = "-p 22 -i key --network-interface eth0 --disable-cache --gloo --no-autotune -hostfile h -prefix-timestamp"
    args = build_parser().parse_args([*words.split(), "python", "-c", "pass"])
    assert (args.ssh_port, args.ssh_identity_file, args.option_NETWORK_INTERFACES) == (22, "key", "eth0")
    assert (args.hostfile, args.prefix_timestamp, args.command) == ("h", True, ["python", "-c", "pass"])


def config(tmp_path: Path, text: str) -> str:
    (tmp_path / "c.yaml").write_text(text)
    return str(tmp_path / "c.yaml")


def test_config_keys_in_long_and_short_form(tmp_path: Path) -> None:
    path = config(
        tmp_path,
        "controller: {gloo: true, mpi: false}\n"
        "params: {fusion_threshold_mb: 32, cycle-time-ms: 2.5}\n"
        "autotune: {enabled: false, log_file: x}\n"
        "timeline: {filename: t.json, mark_cycles: true, timeline_all_ranks: true}\n"
        "stall_check: {enabled: false, warning_time_seconds: 9, stall_check_shutdown_time_seconds: 8}\n"
        "logging: {level: info, without_timestamp: true}\n",
    )
    assert read_config(path) == {
        "FUSION_THRESHOLD": str(32 << 20),
        "CYCLE_TIME": "2.5",
        "STALL_CHECK_DISABLE": "1",
        "STALL_CHECK_TIME_SECONDS": "9.0",
        "STALL_SHUTDOWN_TIME_SECONDS": "8.0",
        "LOG_LEVEL": "info",
        "LOG_HIDE_TIME": "1",
        "TIMELINE": "t.json",
        "TIMELINE_MARK_CYCLES": "1",
        "TIMELINE_ALL_RANKS": "1",
    }
    assert read_config(config(tmp_path, "timeline: {enabled: false, filename: t.json}")) == {}
    assert read_config(config(tmp_path, "timeline: {enabled: true, filename: t.json}")) == {"TIMELINE": "t.json"}
    assert read_config(config(tmp_path, "stall_check: {enabled: true}")) == {"STALL_CHECK_DISABLE": "0"}
    assert read_config(config(tmp_path, "")) == {}


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        ("params: {no-such-thing: 1}", "no-such-thing"),
        ("no_section: {a: 1}", "no_section"),
        ("params: 3", "'params'"),
        ("params: {cycle_time_ms: fast}", "cycle_time_ms must be a number, not 'fast'"),
        ("params: {start_timeout: -5}", "start_timeout must not be negative"),
        ("params: {cycle_time_ms: [1, 2]}", "cycle_time_ms"),
        ("params: {cycle_time_ms: }", "cycle_time_ms"),
        ("stall_check: {enabled: perhaps}", "enabled must be true or false"),
        ("controller: {mpi: true}", "MPI controller"),
        ("controller: {other: true}", "'other'"),
        ("autotune: {enabled: true}", "autotuning"),
        ("timeline: {file: t.json}", "'file' in section 'timeline'"),
        ("[1, 2]", "sections"),
        ("a: b: c", "cannot be read"),
    ],
)
def test_bad_config_files_are_refused_with_file_and_key(tmp_path: Path, text: str, culprit: str) -> None:
    path = config(tmp_path, text)
    with pytest.raises(LaunchError) as caught:
        read_config(path)
    assert culprit in str(caught.value) and path in str(caught.value)


def test_the_environment_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RONDE_CYCLE_TIME", "1")
    env = worker_environment({"CYCLE_TIME": "2.0"})
    assert (env["PYTHONUNBUFFERED"], env["RONDE_CYCLE_TIME"]) == ("1", "2.0")
