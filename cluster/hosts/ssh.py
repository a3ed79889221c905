"""Run commands on a host with the system's `ssh`, without prompts.

The user's configuration, keys and known_hosts files apply. Host keys are always checked; unknown ones are rejected.
Every call is one connection with three streams of its own, so that it ends with the command and not with the background
processes that the command started.
"""

import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from cluster.errors import UserError
from cluster.fleet.host_spec import SSHSpec
from cluster.hosts.ssh_errors import HostUnreachable, failure, remedy

CONNECT_S = 10
"""For each connection: the host's own, and that of every jump host."""
OPTIONS = (
    *("BatchMode=yes", "StrictHostKeyChecking=yes", "ServerAliveInterval=5", "ServerAliveCountMax=4"),
    *("ControlMaster=no", "ControlPath=none", "ForwardAgent=no", "ForwardX11=no", "ClearAllForwardings=yes"),
    "LogLevel=ERROR",
)
NO_PROMPT = {"SSH_ASKPASS_REQUIRE": "never"}
"""A jump host's `ssh` gets none of OPTIONS: without a terminal it would prompt in a window."""
FAILED = 255
"""Exit code of `ssh` itself if there is no connection."""
OnLine = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CompletedCommand:
    code: int
    output: bytes
    stderr: str


@dataclass(frozen=True, slots=True)
class Remote:
    """A host that `ssh` reaches. `host` is written as in the fleet file."""

    host: str
    ssh: SSHSpec = field(default_factory=SSHSpec)

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the ssh command that runs `arguments`.

        They are quoted as one argument, which every login shell parses in the same way.
        """
        s = self.ssh
        settings = [
            *(["-F", _file(s.config)] if s.config else []),
            *(["-i", _file(s.key), "-o", "IdentitiesOnly=yes"] if s.key else []),
            *(["-l", s.user] if s.user else []),
            *(["-p", str(s.port)] if s.port else []),
            *(["-J", s.jump] if s.jump else []),
        ]
        connections = 1 + (s.jump.count(",") + 1 if s.jump else 0)
        options = [a for o in (*OPTIONS, f"ConnectTimeout={CONNECT_S * connections}") for a in ("-o", o)]
        return ["ssh", *settings, *options, "-T", "--", self.host, f"exec {shlex.join(arguments)}"]

    def run(
        self, arguments: Sequence[str], stdin: bytes = b"", *, timeout_s: float, on_line: OnLine | None = None
    ) -> CompletedCommand:
        """Run `arguments` there with `stdin`; `on_line` is called at once for each line of output.

        Raises HostUnreachable, also after `timeout_s`, and HostRefused.
        """
        try:
            process = subprocess.Popen(
                self.command(arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True, env=os.environ | NO_PROMPT,
            )  # fmt: skip
        except FileNotFoundError:
            raise UserError(
                "this machine has no `ssh`",
                "install OpenSSH's client; on Debian and Ubuntu: apt install openssh-client",
            ) from None
        timed_out = threading.Event()

        def end() -> None:
            timed_out.set()
            _kill(process)

        timer = threading.Timer(timeout_s, end)
        timer.daemon = True
        timer.start()
        try:
            output, stderr = _exchange(process, stdin, on_line)
            code = process.wait()
        finally:
            timer.cancel()
            _kill(process)
        if timed_out.is_set():
            raise HostUnreachable(
                f"host {self.host} did not respond within {timeout_s:.0f} s", remedy(self.host, self.ssh.jump)
            )
        if code == FAILED:
            raise failure(self.host, stderr, self.ssh.jump)
        return CompletedCommand(code, output, stderr)


def _exchange(process: "subprocess.Popen[bytes]", stdin_bytes: bytes, on_line: OnLine | None) -> tuple[bytes, str]:
    """Return the process's stdout and stderr.

    Threads serve all three pipes, so that a full pipe cannot block it.
    """
    stderr_bytes = bytearray()
    assert process.stdin and process.stdout and process.stderr
    errors, stdin = process.stderr, process.stdin
    reader = threading.Thread(target=lambda: stderr_bytes.extend(errors.read()), daemon=True)
    writer = threading.Thread(target=_write, args=(stdin, stdin_bytes), daemon=True)
    reader.start()
    writer.start()
    output = bytearray()
    for line in process.stdout:
        output += line
        if on_line is not None:
            on_line(line.decode(errors="replace").rstrip("\n"))
    reader.join()
    writer.join()
    for pipe in (process.stdout, process.stderr):
        pipe.close()
    return bytes(output), stderr_bytes.decode(errors="replace")


def _write(stdin: IO[bytes], content: bytes) -> None:
    with suppress(OSError), stdin:  # the process may end before it has read all; its exit code shows why
        stdin.write(content)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:  # not yet reaped, so the group's number is still its own
        os.killpg(process.pid, signal.SIGKILL)


def _file(text: str) -> str:
    return str(Path(text).expanduser())
