"""One host as the system's `ssh` reaches it: with its user's configuration, keys and known hosts, and no prompt.

Host keys are checked, never accepted unseen. Every call is one connection whose three streams are ours, so that it
ends with the command and not with what that started in the background.
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

from cluster.errors import FleetError, PolyfleetError, UserError
from cluster.hosts.spec import SSHSpec

CONNECT_S = 10
OPTIONS = (
    *("BatchMode=yes", "StrictHostKeyChecking=yes", f"ConnectTimeout={CONNECT_S}", "ServerAliveInterval=5"),
    *("ServerAliveCountMax=4", "ControlMaster=no", "ControlPath=none", "ForwardAgent=no", "ForwardX11=no"),
    *("ClearAllForwardings=yes", "LogLevel=ERROR"),
)
FAILED = 255
"""What `ssh` itself exits with when there is no connection."""
LONGEST_WORDS = 300
Hear = Callable[[str], None]


class HostUnreachable(FleetError):
    """Nothing answers there now."""


class HostRefused(UserError):
    """The host answers, but not to us: an unknown or changed host key, a key that it does not take, no such name."""


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    output: bytes
    said: str


@dataclass(frozen=True, slots=True)
class Remote:
    """`host` as in the fleet file; `name` is how messages call it."""

    host: str
    ssh: SSHSpec = field(default_factory=SSHSpec)

    def command(self, words: Sequence[str]) -> list[str]:
        """The login shell there may be any: it is given one word that each of them reads alike."""
        s = self.ssh
        own = [
            *(["-F", _file(s.config)] if s.config else []),
            *(["-i", _file(s.key), "-o", "IdentitiesOnly=yes"] if s.key else []),
            *(["-l", s.user] if s.user else []),
            *(["-p", str(s.port)] if s.port else []),
            *(["-J", s.jump] if s.jump else []),
        ]
        options = [word for option in OPTIONS for word in ("-o", option)]
        return ["ssh", *own, *options, "-T", "--", self.host, f"exec {shlex.join(words)}"]

    def run(self, words: Sequence[str], given: bytes = b"", *, timeout_s: float, hear: Hear | None = None) -> Answer:
        """Run `words` there with `given` as its input; each line of its output is told to `hear` at once.

        Raises HostUnreachable, also after `timeout_s`, and HostRefused.
        """
        try:
            process = subprocess.Popen(
                self.command(words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
        except FileNotFoundError:
            raise UserError(
                "this machine has no `ssh`", "install OpenSSH's client; on Debian: openssh-client"
            ) from None
        late = threading.Event()

        def end() -> None:
            late.set()
            _kill(process)

        timer = threading.Timer(timeout_s, end)
        timer.daemon = True
        timer.start()
        try:
            output, said = _exchange(process, given, hear)
            code = process.wait()
        finally:
            timer.cancel()
            _kill(process)
        if late.is_set():
            raise HostUnreachable(
                f"host {self.host} gave no answer within {timeout_s:.0f} s", TRY.format(host=self.host)
            )
        if code == FAILED:
            raise failure(self.host, said)
        return Answer(code, output, said)


TRY = "see whether `ssh {host} true` answers, then run the same again"


def failure(host: str, said: str) -> PolyfleetError:
    """What ssh said when no connection came about, in our words."""
    lowered, last = said.lower(), _last(said)
    if "could not resolve hostname" in lowered or "name or service not known" in lowered:
        return HostRefused(
            f"host {host} is unknown: {last}", "write the name that `ssh` knows it by, or its IP address"
        )
    if "identification has changed" in lowered:
        return HostRefused(
            f"the key of host {host} is not the one in known_hosts",
            "find out why, since another machine may answer under its name; then `ssh-keygen -R` forgets the old key",
        )
    if "host key verification failed" in lowered or "no matching host key" in lowered:
        return HostRefused(
            f"the key of host {host} is in no known_hosts file",
            f"run `ssh {host}` once and compare the fingerprint it shows with the host's own",
        )
    if "permission denied" in lowered or "too many authentication failures" in lowered:
        return HostRefused(
            f"host {host} refuses our key: {last}",
            f"name the right `ssh.user` and `ssh.key`, or add the key there: ssh-copy-id {host}",
        )
    return HostUnreachable(f"host {host} is not reached: {last}", TRY.format(host=host))


def _last(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][:LONGEST_WORDS] if lines else "ssh gave no reason"


def _exchange(process: "subprocess.Popen[bytes]", given: bytes, hear: Hear | None) -> tuple[bytes, str]:
    """All of its output, and what it said on stderr. Three pipes are served at once: none can fill and stop it."""
    said = bytearray()
    assert process.stdin and process.stdout and process.stderr
    errors, door = process.stderr, process.stdin
    reader = threading.Thread(target=lambda: said.extend(errors.read()), daemon=True)
    writer = threading.Thread(target=_write, args=(door, given), daemon=True)
    reader.start()
    writer.start()
    output = bytearray()
    for line in process.stdout:
        output += line
        if hear is not None:
            hear(line.decode(errors="replace").rstrip("\n"))
    reader.join()
    writer.join()
    for pipe in (process.stdout, process.stderr):
        pipe.close()
    return bytes(output), said.decode(errors="replace")


def _write(door: IO[bytes], given: bytes) -> None:
    with suppress(OSError), door:  # it may end before it has read all: its exit code says why
        door.write(given)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:  # not yet reaped, so the group's number is still its own
        os.killpg(process.pid, signal.SIGKILL)


def _file(text: str) -> str:
    return str(Path(text).expanduser())
