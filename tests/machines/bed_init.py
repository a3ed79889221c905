"""Process 1 of a machine: makes the mount and host names its own, then collects processes that have ended.

It runs in new namespaces, and is told by one line of JSON on its standard input what to mount. It says `ready`, and
ends when that input does: so no machine outlives the tests, however those end. Standard library only.
"""

import ctypes
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
LIBC = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    said = LIBC.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode())
    if said != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} on {target}: {os.strerror(number)}")


def bind(source: str, target: str, read_only: bool = False) -> None:
    mount(source, target, flags=MS_BIND | MS_REC)
    if read_only:
        mount("", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY)


def make_own(told: dict) -> None:
    """`hidden` folders are empty and in memory, but for `shown` ones in them: [path, read only]; `folders` are bound
    {where: what}; `files` hold {where: text}, and those that exist outside are replaced here alone.
    """
    mount("", "/", flags=MS_REC | MS_PRIVATE)
    # By descriptors: below, what these paths lead to is hidden.
    shown = [(os.open(path, os.O_PATH), path, read_only) for path, read_only in told["shown"]]
    folders = [(os.open(what, os.O_PATH), where) for where, what in told["folders"].items()]
    for where, mode in told["hidden"].items():
        mount("tmpfs", where, "tmpfs", options=f"mode={mode}")
    for what, where in folders:
        bind(f"/proc/self/fd/{what}", where)
    for what, path, read_only in shown:
        Path(path).mkdir(parents=True, exist_ok=True)
        bind(f"/proc/self/fd/{what}", path, read_only)
    mount("proc", "/proc", "proc")
    for number, (where, text) in enumerate(told["files"].items()):
        write(where, text, number)
    socket.sethostname(told["name"])


def write(where: str, text: str, number: int) -> None:
    """In /run, or over a file that is there; a link that leads nowhere stays one."""
    ours = where.startswith("/run/")
    file = Path(where if ours else f"/run/files/{number}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o600 if ours else 0o644)
    if not ours and Path(where).exists():
        bind(str(file), where)


def collect() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def serve() -> None:
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        there, _, _ = select.select([0, woken], [], [])
        if 0 in there and not os.read(0, 1):
            return
        if woken in there:
            os.read(woken, 512)
        collect()


if __name__ == "__main__":
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(0, 1 << 16)
    make_own(json.loads(line))
    os.write(1, b"ready\n")
    os.chdir("/")
    serve()
    sys.exit(0)
