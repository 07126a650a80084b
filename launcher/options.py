"""The options of a job, from flags and config files to the workers' environment. Their table is the core's."""

from __future__ import annotations

import os
from typing import Any

from ronde import _core
from ronde.launcher.errors import LaunchError

# Sections of a config file for what comes later, and their keys that ask for nothing.
_LATER_SECTIONS = {"autotune": "autotuning"}
_BOOLS = {"1": "1", "0": "0", "true": "1", "false": "0", "yes": "1", "no": "0", "on": "1", "off": "0"}


def option_value(kind: str, default: str, scale: float, flag: str, text: str) -> str:
    """The environment's form of a flag's value. Raises LaunchError."""
    if kind == "String":
        return text
    if kind == "Bool":
        if text.lower() not in _BOOLS:
            raise LaunchError(f"{flag} must be true or false, not '{text}'")
        return _BOOLS[text.lower()]
    try:
        value = float(text) * scale
        whole = int(value)
    except (ValueError, OverflowError):  # not a number, or none that is finite
        raise LaunchError(f"{flag} must be a number, not '{text}'") from None
    if value < 0 <= float(default):  # a default below zero says "unset", so the option has such values
        raise LaunchError(f"{flag} must not be negative, but is '{text}'")
    if kind == "Double":
        return repr(value)
    if scale == 1 and whole != value:
        raise LaunchError(f"{flag} must be a whole number, not '{text}'")
    return str(whole)


def _config_keys() -> dict[str, dict[str, tuple[Any, bool]]]:
    """Section -> key -> (row of the table, whether the key says the opposite). A key is the flag's name; it may leave out
    what its section says already: stall_check: {enabled: true, warning_time_seconds: 60}, logging: {level: info}."""
    keys: dict[str, dict[str, tuple[Any, bool]]] = {}
    for row in _core.OPTIONS:
        flag, section = row[4].lstrip("-").replace("-", "_"), row[6]
        if not flag:
            continue
        known = keys.setdefault(section, {})
        known[flag] = row, False
        for prefix in (f"{section}_", "log_"):
            if flag.startswith(prefix):
                known.setdefault(flag[len(prefix) :], (row, False))
        if flag.startswith("no_"):
            known[flag[3:]] = row, True
            if flag[3:] == section:
                known["enabled"] = row, True
    return keys


def _controller(path: str, options: dict[Any, Any]) -> None:
    for key, value in options.items():
        if key not in ("gloo", "mpi"):
            raise LaunchError(f"{path}: there is no option '{key}' in section 'controller' (there are: gloo, mpi)")
        if key == "mpi" and value:
            raise LaunchError(f"{path}: mpi: the MPI controller is not available in this release")


def read_config(path: str) -> dict[str, str]:
    """The options of a YAML config file, by name, in the environment's form. Raises LaunchError."""
    import yaml

    try:
        with open(path, encoding="utf-8-sig") as file:
            sections = yaml.safe_load(file) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LaunchError(f"the config file {path} cannot be read: {error}") from None
    if not isinstance(sections, dict):
        raise LaunchError(f"the config file {path} must hold sections with options")
    keys = _config_keys()
    values: dict[str, str] = {}
    for section, options in sections.items():
        options = {} if options is None else options
        if not isinstance(options, dict):
            raise LaunchError(f"{path}: section '{section}' must hold options")
        if section == "controller":
            _controller(path, options)
            continue
        if section in _LATER_SECTIONS and section not in keys:
            if any(options.values()) and options.get("enabled", True):
                raise LaunchError(f"{path}: {section}: {_LATER_SECTIONS[section]} is not available in this release")
            continue
        if section not in keys:
            raise LaunchError(f"{path}: there is no section '{section}' (there are: {', '.join(sorted(keys))})")
        if section == "timeline" and "enabled" in options:  # no option: what the section says holds or does not
            if option_value("Bool", "", 1, f"{path}: enabled", str(options.pop("enabled"))) == "0":
                continue
        for key, value in options.items():
            found = keys[section].get(str(key).replace("-", "_"))
            if found is None:
                known = ", ".join(sorted(keys[section]))
                raise LaunchError(f"{path}: there is no option '{key}' in section '{section}' (there are: {known})")
            (name, kind, default, _scope, _flag, scale, *_), opposite = found
            if value is None or isinstance(value, (dict, list)):
                raise LaunchError(f"{path}: '{key}' in section '{section}' needs one value")
            text = option_value(kind, default, scale, f"{path}: {key}", str(value))
            values[name] = ("0" if text == "1" else "1") if opposite else text
    return values


def worker_environment(options: dict[str, str]) -> dict[str, str]:
    env = dict(os.environ)
    for name, value in options.items():
        env["RONDE_" + name] = value
    env.setdefault("PYTHONUNBUFFERED", "1")
    return env
