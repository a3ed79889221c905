"""One machine of the bed: a process tree with its own network, processes, host name, home, /tmp, /dev/shm and /run.

The rest of the file system is this machine's. `power_off` is what pulling its plug is: nobody hears anything of it.
"""

import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from bed_ssh import SSHD, Key, new_key

HOME = Path(pwd.getpwuid(os.geteuid()).pw_dir)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HIDDEN = {"/tmp": "1777", "/dev/shm": "1777", "/run": "755", "/sys/fs/cgroup": "755"}
INIT = Path(__file__).with_name("bed_init.py")
ANSWER_S = 180.0
FULL_DISK_BYTES = 64 << 20
SMALL_DISK = """
where=$1 size=$2; shift 2
mkdir -p "$where" /run/old /run/whole
mount --rbind "$where" /run/whole
mount --bind "$where" /run/old
mount -t tmpfs -o "size=$(( $(du -sb /run/old | cut -f1) * 2 + size )),mode=700" full "$where"
cp -a /run/old/. "$where"
for path; do mount --bind "/run/whole/${path#"$where"}" "$path"; done
umount -l /run/old /run/whole
"""
"""A file system in memory over a folder, with what that holds. What is mounted in it stays."""


class Machine:
    """`home` is HOME inside the machine, `disk` the folder of it outside, which outlives every boot. `wiring` plugs its
    network in and out; `files` are those of /etc that all machines of the bed have.
    """

    def __init__(self, name: str, address: str, folder: Path, shown: Sequence[tuple[Path, bool]], wiring: Any):
        self.name, self.address, self.home, self.disk = name, address, HOME, folder / "home"
        self._folder, self._shown, self._wiring = folder, shown, wiring
        self.disk.mkdir(parents=True, mode=0o700)
        self.key = self._right_key = new_key(folder / "host-key")
        self._unshare: subprocess.Popen[bytes] | None = None
        self._sshd: subprocess.Popen[str] | None = None
        self._init_log = folder / "init.log"
        self._full: list[str] = []
        self._hidden: list[str] = []
        self._beside: list[subprocess.Popen[str]] = []
        self.init = 0

    def __repr__(self) -> str:
        return f"{self.name} ({self.address})"

    # -- power

    @property
    def is_up(self) -> bool:
        return self._unshare is not None

    def begin_boot(self, told: Mapping[str, Any]) -> None:
        """The first half of a boot, which does not wait; `told` is what bed_init takes, but for what is this one's."""
        namespaces = ["--net", "--mount", "--uts", "--ipc", "--pid"]
        words = ["unshare", *namespaces, "--fork", "--kill-child", sys.executable, "-I", "-S", str(INIT)]
        with self._init_log.open("w") as log:
            self._unshare = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        assert self._unshare.stdin is not None
        self._unshare.stdin.write(b"%s\n" % self._told(told))
        self._unshare.stdin.flush()

    def _told(self, told: Mapping[str, Any]) -> bytes:
        files = {
            "/etc/hostname": f"{self.name}\n",
            "/proc/sys/kernel/random/boot_id": f"{uuid.uuid4()}\n",
            "/run/host-key": self.key.private,
            "/run/sshd.conf": SSHD.format(address=self.address),
        }
        shown = [(str(path), read_only) for path, read_only in self._shown]
        hidden = {folder: mode for folder, mode in HIDDEN.items() if Path(folder).is_dir()}
        own = {"name": self.name, "hidden": hidden, "folders": {str(HOME): str(self.disk)}, "shown": shown}
        return json.dumps({**own, "files": {**told["files"], **files}}).encode()

    def end_boot(self) -> None:
        """The second: until its sshd answers."""
        assert self._unshare is not None and self._unshare.stdout is not None
        said = self._unshare.stdout.readline()
        assert said == b"ready\n", f"{self.name} did not start: {self._init_log.read_text()}"
        [child] = psutil.Process(self._unshare.pid).children()
        self.init = child.pid
        self._wiring.plug_in(self)
        self.start_sshd()

    def boot(self) -> None:
        """With its old files and without a process."""
        assert not self.is_up, f"{self.name} is up"
        self.begin_boot(self._wiring.told)
        self.end_boot()

    def power_off(self) -> None:
        """The network first: no connection is closed, as a kernel that goes on would do for its dead processes."""
        if self._unshare is None:
            return
        self._wiring.plug_out(self)
        os.kill(self.init, 9)
        self._unshare.communicate()
        if self._sshd is not None:
            self._sshd.communicate()
        for process in self._beside:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(BrokenPipeError):
                    if pipe is not None:
                        pipe.close()
        self._beside = []
        self._unshare, self._sshd, self._full, self._hidden, self.init = None, None, [], [], 0

    # -- programs

    def enter(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> list[str]:
        """The command that runs `argv` in here, in its home. Whoever kills it kills that."""
        variables = {"HOME": str(HOME), "USER": "root", "LOGNAME": "root", "SHELL": "/bin/sh", "PATH": PATH}
        given = [f"{k}={v}" for k, v in (variables | {"LANG": "C.UTF-8"} | dict(env or {})).items()]
        spaces = ["--mount", "--uts", "--ipc", "--net", "--pid"]
        inside = ["setpriv", "--pdeathsig", "KILL", "env", "-i", *given, "sh", "-c", 'cd && exec "$@"', "sh", *argv]
        return ["nsenter", f"--target={self.init}", *spaces, "--", *inside]

    def popen(self, argv: Sequence[str], env: Mapping[str, str] | None = None, **pipes: Any) -> "subprocess.Popen[str]":
        """A program in here; what is not said of its pipes leads nowhere. Its own children outlive it."""
        nowhere = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        return subprocess.Popen(self.enter(argv, env), text=True, **(nowhere | pipes))

    def beside(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, **pipes: Any
    ) -> "subprocess.Popen[str]":
        """As `popen`; it ends with this boot."""
        self._beside.append(self.popen(argv, env, **pipes))
        return self._beside[-1]

    def run(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, *, check: bool = True
    ) -> "subprocess.CompletedProcess[str]":
        """As by a shell in here, with its output. `env` adds to what a login has. What it leaves behind must not hold
        its output open.
        """
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        ran = subprocess.run(self.enter(argv, env), check=False, **pipes)
        assert not check or ran.returncode == 0, f"{self.name}: {argv}: {ran.returncode}: {ran.stdout}{ran.stderr}"
        return ran

    def inside(self, path: Path | str) -> Path:
        """A path of this machine, as it is reached from outside while it is up."""
        return Path(f"/proc/{self.init}/root{path}")

    def reaches(self, address: str, port: int = 22, within_s: float = 1.0) -> bool:
        """Whether a connection from in here is accepted. False also where it is refused at once."""
        code = f"import socket; socket.create_connection(({address!r}, {port}), {within_s}).close()"
        return self.run([sys.executable, "-I", "-S", "-c", code], check=False).returncode == 0

    # -- SSH

    @property
    def sshd_log(self) -> Path:
        return self._folder / "sshd.log"

    def start_sshd(self) -> None:
        """And wait until it answers."""
        with self.sshd_log.open("a") as log:
            self._sshd = self.popen(["/usr/sbin/sshd", "-D", "-e", "-f", "/run/sshd.conf"], stderr=log)
        deadline = time.monotonic() + ANSWER_S
        while not self._answers():
            assert self._sshd.poll() is None, f"sshd of {self.name} ended: {self.sshd_log.read_text()}"
            assert time.monotonic() < deadline, f"sshd of {self.name} does not answer: {self.sshd_log.read_text()}"
            time.sleep(0.02)

    def _answers(self) -> bool:
        """Asked from in here: a fault on the wire does not matter."""
        listening = Path(f"/proc/{self.init}/net/tcp").read_text().splitlines()[1:]
        return any(line.split()[1].endswith(":0016") and line.split()[3] == "0A" for line in listening)

    def stop_sshd(self) -> None:
        """New connections are refused; sessions that are open go on."""
        if self._sshd is not None:
            self._sshd.kill()
            self._sshd.communicate()
            self._sshd = None
            while self._answers():  # what is killed with it ends a moment later
                time.sleep(0.01)

    def change_host_key(self) -> Key:
        """It answers with a key that nobody knows, until it is healed."""
        return self._answer_with(new_key(self._folder / "other-host-key"))

    def _answer_with(self, key: Key) -> Key:
        self.key = key
        if self.is_up:
            self.stop_sshd()
            self.inside("/run/host-key").write_text(key.private)
            self.start_sshd()
        return key

    # -- faults of the machine itself

    def fill_disk(
        self, folder: Path | str | None = None, left_bytes: int = 0, size_bytes: int = FULL_DISK_BYTES
    ) -> None:
        """The disk of `folder` (its home) has so much left. A small one in memory takes the folder's place the first
        time, with a copy of what it holds and room for `size_bytes` more: do it before programs open files there. What
        is written there until it is healed is lost.
        """
        where = str(folder or HOME)
        if where not in self._full:
            shown = [str(path) for path, _ in self._shown if path.is_relative_to(where)]
            self.run(["sh", "-ec", SMALL_DISK, "sh", where, str(size_bytes), *shown])
            self._full.append(where)
        filler = Path(where) / ".filler"
        self.run(["rm", "-f", str(filler)])
        free = shutil.disk_usage(self.inside(where)).free
        self.run(["fallocate", "-l", str(max(1, free - left_bytes)), str(filler)])

    def hide_python(self) -> None:
        """No Python can be started by a name or a path, the one of these tests either; nor this machine's `uv`."""
        found = (
            "for d in /usr/local/bin /usr/bin /bin; do ls -d $d/python[0-9]* $d/python $d/uv 2>/dev/null; done; true"
        )
        files = {os.path.realpath(path) for path in [*self.run(["sh", "-c", found]).stdout.split(), sys.executable]}
        for file in sorted(files):
            self.run(["mount", "--bind", "/dev/null", file])
            self._hidden.append(file)

    def heal(self) -> None:
        """Undo the faults of this machine; one that is off stays off."""
        self.key, changed = self._right_key, self.key != self._right_key
        if not self.is_up:
            return
        for where in [*self._full, *self._hidden]:
            self.run(["umount", "-l", where])
        self._full, self._hidden = [], []
        if changed:
            self._answer_with(self._right_key)
        elif self._sshd is None:
            self.start_sshd()


def reach(address: str, port: int = 22, within_s: float = 1.0) -> bool:
    """As Machine.reaches, from this host."""
    try:
        socket.create_connection((address, port), within_s).close()
    except OSError:
        return False
    return True
