"""The system's ssh: the command that starts an agent on another host, and what its failures mean.

Nothing that is secret, and nothing of the job, is on the command line, which everybody on either host can read: path,
environment, command and secret follow through the agent's stdin.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from typing import Optional

from ronde.launcher import frames
from ronde.launcher.hosts import Host

_CONNECT_SECONDS = 20.0

# What Python runs there: says the marker, takes the module path (a line), goes on as `module`.
_BOOT = (
    f"import os,sys;os.write(1,{frames.MARKER!r});"
    r'line=os.fsdecode(sys.stdin.buffer.raw.readline()[:-1]);sys.path[:1]=[p for p in line.split("\0") if p];'
).replace("'", '"')


@dataclass(frozen=True)
class Ssh:
    port: Optional[int] = None
    identity_file: Optional[str] = None
    python: Optional[str] = None  # on the other hosts; else the launcher's

    @property
    def interpreter(self) -> str:
        return self.python or sys.executable

    def command(self, host: Host, limit: float, peer_timeout: float, module: str = "ronde.launcher.agent") -> list[str]:
        """``limit``: seconds for the start; ``peer_timeout``: seconds of silence after which the host counts as lost."""
        words = ["ssh", "-T", "-S", "none", "-o", "BatchMode=yes"]
        words += ["-o", f"ConnectTimeout={max(1, int(min(limit, _CONNECT_SECONDS)))}"]
        words += ["-o", f"ServerAliveInterval={max(1, int(peer_timeout / 3))}", "-o", "ServerAliveCountMax=3"]
        if self.port is not None:
            words += ["-p", str(self.port)]
        if self.identity_file is not None:
            words += ["-i", self.identity_file]
        if host.user is not None:
            words += ["-l", host.user]
        boot = _BOOT + f"from {module} import main;main(False)"
        return [*words, "--", host.name, f"exec {shlex.quote(self.interpreter)} -c {shlex.quote(boot)}"]

    def explain(self, code: Optional[int], said: str, ready: bool) -> str:
        """Why the agent's ssh ended; ``said``: the last that came on stderr, and on stdout before the marker."""
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        last = lines[-1] if lines else ""
        if ready:
            return f"the connection to its agent ended: {last or 'the network failed, or the agent was killed'}"
        if code in (126, 127):
            return (
                f"the Python interpreter {self.interpreter} cannot be started there (--python names another)"
                + (f": {last}" if last else "")
            )  # fmt: skip
        if "No module named 'ronde" in last:
            return f"ronde is not installed for {self.interpreter} there: {last}"
        if code == 255:
            hint = ""
            if "Host key verification failed" in said:
                hint = "; connect once by hand, or add the host's key to known_hosts"
            return f"ssh cannot connect: {last or 'it gives no reason'}{hint}"
        return f"the agent did not start (ssh ended with code {code}): {' | '.join(lines[-5:]) or 'it said nothing'}"


def module_path_line() -> bytes:
    """The modules that PYTHONPATH adds, for _BOOT."""
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.fsencode("\0".join(path for path in paths if "\n" not in path)) + b"\n"
