"""The limits of a process that reads files of strangers. It sets them itself, before it opens the first.

Nothing of such a file is run, so these are no walls around foreign code: they bound what a mistake of ours, or a form
of file that nobody thought of, can cost the machine. Memory and time grow with what is read, since honest files
are large, too: whoever reads says so with `expect`, which does nothing in a process without limits.
"""

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MEMORY_BYTES = 160 << 20
"""Above what the process has when the limits are set."""
MEMORY_PER_BYTE = 40
"""Of metadata: a number of a pickle takes some 15 bytes in the file, and 100 as part of a list in memory."""
LARGEST_MEMORY_BYTES = 4 << 30
CPU_S = 15
METADATA_BYTES_PER_S = 256 << 10
DATA_BYTES_PER_S = 16 << 20
"""So slow may reading, hashing and writing be together. Measured: 300 MiB for each second of processor time."""
WAITING = 20
"""Seconds by the clock for each of processor time: disks are slow, and processors shared."""
DESCRIPTORS = 1024

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38


@dataclass(slots=True)
class _Spent:
    """What was allowed so far. `base_bytes`: data, and address space, that the process had at first."""

    base_bytes: tuple[int, int]
    memory_bytes: int
    cpu_s: float
    mapped_bytes: int = 0


_spent: _Spent | None = None


def isolate() -> bool:
    """No core files, no new privileges, and the end of the process with its parent's thread; at last no network.

    Answers whether the network is cut off: some systems let no process do so. To be called before there are threads.
    """
    without_privileges()
    libc = _libc()
    return libc is not None and (_without_network(libc) or _without_sockets(libc))


def without_privileges() -> None:
    """The same with the network as it is."""
    _limit(resource.RLIMIT_CORE, 0)
    if (libc := _libc()) is not None:
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def apply_limits() -> None:
    """Limits for what is read from here on, beyond what the process has and has used; all libraries are loaded."""
    global _spent
    _limit(resource.RLIMIT_NOFILE, DESCRIPTORS)
    _limit(resource.RLIMIT_FSIZE, 0)
    _spent = _Spent(_memory(), MEMORY_BYTES, CPU_S)
    _apply(_spent)


def raise_limits(*, metadata_bytes: int = 0, data_bytes: int = 0, mapped_bytes: int = 0, file_bytes: int = 0) -> None:
    """So much is read, and a file so large written, from here on: limits grow by what that may honestly cost."""
    if _spent is None:
        return
    _spent.memory_bytes = min(_spent.memory_bytes + metadata_bytes * MEMORY_PER_BYTE, LARGEST_MEMORY_BYTES)
    _spent.mapped_bytes += mapped_bytes
    _spent.cpu_s += metadata_bytes / METADATA_BYTES_PER_S + data_bytes / DATA_BYTES_PER_S
    if file_bytes:
        _limit(resource.RLIMIT_FSIZE, file_bytes)
    _apply(_spent)


def limit_message(code: int) -> str:
    """What ended a process with exit code `code`, where that was one of these limits; else ""."""
    if code in (-signal.SIGXCPU, -signal.SIGALRM):
        return "it took much longer than files of its size do"
    return "it does not fit into memory, or is not what it claims to be" if code == -signal.SIGSEGV else ""


def _apply(spent: _Spent) -> None:
    data_bytes, space_bytes = spent.base_bytes
    if sys.platform == "linux":
        _limit(resource.RLIMIT_DATA, data_bytes + spent.memory_bytes)
        # Threads reserve address space that they never touch.
        _limit(resource.RLIMIT_AS, space_bytes + spent.memory_bytes + spent.mapped_bytes + (1 << 30))
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + spent.cpu_s) + 1)
    signal.alarm(min(int(spent.cpu_s * WAITING) + 1, 2**31 - 1))


def _limit(kind: int, value: int) -> None:
    """The soft limit only: it must be able to grow, and nothing foreign runs here that could raise it."""
    with suppress(ValueError, OSError):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _memory() -> tuple[int, int]:
    """Bytes of writable memory, and of address space, that this process has."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        return int(lines["VmData"].split()[0]) << 10, int(lines["VmSize"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return 1 << 30, 8 << 30


def _libc() -> "ctypes.CDLL | None":
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return libc if hasattr(libc, "prctl") and hasattr(libc, "unshare") else None
    except OSError:
        return None


def _without_network(libc: ctypes.CDLL) -> bool:
    """Into a network of its own, which has no way out."""
    if os.geteuid() == 0 and libc.unshare(_NEW_NET) == 0:
        return True
    return bool(libc.unshare(_NEW_USER | _NEW_NET) == 0)


_SYSTEMS = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
"""The kernel's name of the architecture, and its number of socket(2). Source: linux/audit.h, asm/unistd.h."""
_IO_URING_SETUP = 425


def _without_sockets(libc: ctypes.CDLL) -> bool:
    """Where a container allows no namespaces: the kernel refuses socket(2) for anything but Unix sockets.

    Nine instructions of seccomp's filter, over struct seccomp_data (number at 0, architecture at 4, arguments from 16).
    """
    if platform.machine() not in _SYSTEMS or sys.platform != "linux":
        return False
    architecture, socket_number = _SYSTEMS[platform.machine()]
    load, equal, answer = 0x20, 0x15, 0x06
    refuse, allow = 0x00050000 | 13, 0x7FFF0000  # EACCES
    program = [
        (load, 0, 0, 4), (equal, 0, 6, architecture),
        (load, 0, 0, 0), (equal, 4, 0, _IO_URING_SETUP), (equal, 0, 2, socket_number),
        (load, 0, 0, 16), (equal, 0, 1, 1),  # AF_UNIX
        (answer, 0, 0, allow), (answer, 0, 0, refuse),
    ]  # fmt: skip
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    held = ctypes.create_string_buffer(code, len(code))
    described = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(held)))
    return bool(libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(described), 0, 0) == 0)
