"""However a run of tests ends, its processes, temporary folders and shared memory are removed.

A run has a folder, which is TMPDIR of all processes that it starts, and an identifier in their environment. A watcher
outside the run waits until the run has ended or was killed. Then it kills the processes that have that identifier or
work in that folder, and removes the folder.
    python tests/leftovers.py PID RUN FOLDER SHARED_MEMORY...
"""

import os
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

RUN = "POLYFLEET_TESTS_RUN"
SHARED_MEMORY = Path("/dev/shm")
OWNERS = {os.getuid(), 65534} if os.getuid() == 0 else {os.getuid()}
"""Users whose shared memory may be of a run: where root runs the tests, PostgreSQL runs as nobody (65534)."""
ENDING_S = float(os.environ.get("POLYFLEET_TESTS_ENDING_S", "20"))
"""How long a process may take to end after the last test."""


class Run:
    """A folder and an identifier, until `end`."""

    def __init__(self) -> None:
        self.number = secrets.token_hex(8)
        # Short and open to other users: a socket's path has at most 107 bytes, and PostgreSQL runs as nobody.
        self.folder = Path(tempfile.mkdtemp(prefix="pft-"))
        self.folder.chmod(0o755)
        self._memory = _shared_memory()
        # What torch has compiled once is kept where torch keeps it.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
        os.environ |= {RUN: self.number, "TMPDIR": str(self.folder)}
        tempfile.tempdir = None
        words = [sys.executable, "-I", __file__, str(os.getpid()), self.number, str(self.folder), *self._memory]
        silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._watcher = subprocess.Popen(words, cwd="/", start_new_session=True, **silent)

    def left(self, wait_s: float = ENDING_S) -> list[str]:
        """Processes that still run after `wait_s`, a line each."""
        until = time.monotonic() + wait_s
        while (left := list(processes_of(self.number, self.folder))) and time.monotonic() < until:
            time.sleep(0.1)
        return [describe(process) for process in left]

    def end(self) -> None:
        sweep(self.number, self.folder, self._memory)
        self._watcher.returncode = 0  # it ends after us


class Cleaning:
    """The run of one call of pytest: all of its temporary folders are in the run's."""

    def __init__(self, config: pytest.Config):
        self._config, self._run = config, Run()
        if config.option.basetemp is None:
            config.option.basetemp = self._run.folder / "t"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """After the processes that ran tests have ended: xdist ends them in this hook too."""
        broken_off = session.exitstatus == pytest.ExitCode.INTERRUPTED
        if left := self._run.left(0.0 if broken_off else ENDING_S):
            terminal = self._config.pluginmanager.get_plugin("terminalreporter")
            terminal.write_line(
                f"\n{len(left)} processes were still running after the tests, and are killed now:", red=True
            )
            terminal.write("".join(f"  {line}\n" for line in left))
            if session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_unconfigure(self) -> None:
        self._run.end()


def processes_of(run: str, folder: Path) -> Iterator[psutil.Process]:
    """All but this one that were started in that run: some have an environment of their own, or overwrite it."""
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            words = process.cmdline()
            if __file__ in words:
                continue
            of_it = process.environ().get(RUN) == run or any(word.startswith(f"{folder}/") for word in words)
            if of_it or process.cwd().startswith(f"{folder}/"):
                yield process
        except (psutil.Error, OSError):
            continue


def describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.name()}: {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"{process.pid}, which has ended since"


def sweep(run: str, folder: Path, memory_before: Iterable[str]) -> None:
    for _ in range(100):  # what is killed may have started another
        if not (left := list(processes_of(run, folder))):
            break
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        _wait_ended(left)
    _unmount(folder)
    _remove(folder)
    for name in _shared_memory() - set(memory_before) - _mapped():
        with suppress(OSError):
            (SHARED_MEMORY / name).unlink()


def _wait_ended(processes: Iterable[psutil.Process], limit_s: float = 5.0) -> None:
    """Until each is gone or a zombie, which the system's first process may leave for minutes."""
    until = time.monotonic() + limit_s
    while not all(map(_has_ended, processes)) and time.monotonic() < until:
        time.sleep(0.01)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _unmount(folder: Path) -> None:
    with suppress(OSError):
        places = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for place in reversed([place for place in places if place.startswith(f"{folder}/")]):
            subprocess.run(["umount", "-l", place], capture_output=True, check=False)


def _remove(folder: Path) -> None:
    """Also what a test has left without permissions."""
    for path, folders, _ in os.walk(folder):
        for name in folders:
            below = Path(path, name)
            with suppress(OSError):
                if not below.is_symlink() and stat.S_IMODE(below.stat().st_mode) & 0o700 != 0o700:
                    below.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _shared_memory() -> set[str]:
    """Names of files there that a run may have made."""
    with suppress(OSError):
        return {entry.name for entry in os.scandir(SHARED_MEMORY) if entry.stat().st_uid in OWNERS}
    return set()


def _mapped() -> set[str]:
    """Names of shared memory that a living process has open: another run's, or another program's."""
    names = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            opened = [str(entry.readlink()) for entry in Path(f"/proc/{process.pid}/fd").iterdir()]
            paths = [word for line in maps.splitlines() if "/dev/shm/" in line for word in line.split()[5:6]]
            names |= {path.removeprefix(f"{SHARED_MEMORY}/") for path in (*paths, *opened)}
    return names


def main() -> None:
    pid, run, folder, *memory = sys.argv[1:]
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(pid)).wait()
    sweep(run, Path(folder), memory)


if __name__ == "__main__":
    main()
