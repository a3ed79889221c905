"""Resource limits of a process that reads untrusted files.

It sets them itself, before it opens the first file. No code in such a file is executed, so this is not a sandbox for
foreign code: the limits bound the harm that a bug of ours, or an unforeseen kind of file, can do to the machine. Valid
files may be large too, so memory and time grow with the bytes to read: the reader announces them with `raise_limits`,
which does nothing in a process without limits.
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
"""Memory allowed in addition to what the process has when the limits are set."""
MEMORY_PER_BYTE = 40
"""Memory per byte of metadata: a number in a pickle takes some 15 bytes in the file, and 100 in a list in memory."""
MAX_MEMORY_BYTES = 4 << 30
CPU_S = 15
METADATA_BYTES_PER_S = 256 << 10
DATA_BYTES_PER_S = 16 << 20
"""Minimum rate of reading, hashing and writing together. Measured: 300 MiB per second of CPU time."""
WALL_S_PER_CPU_S = 20
"""Seconds of wall-clock time allowed per second of CPU time: disks are slow, and CPUs shared."""
DESCRIPTORS = 1024

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38


@dataclass(slots=True)
class _Allowance:
    """What is allowed so far.

    `base_bytes`: data, and address space, of the process when the limits were set.
    """

    base_bytes: tuple[int, int]
    memory_bytes: int
    cpu_s: float
    mapped_bytes: int = 0


_allowance: _Allowance | None = None


def isolate() -> bool:
    """Drop privileges (see `without_privileges`), then cut the process off from the network.

    Returns whether the network is cut off, which some systems do not allow. Call this before any thread starts.
    """
    without_privileges()
    libc = _libc()
    return libc is not None and (_without_network(libc) or _without_sockets(libc))


def without_privileges() -> None:
    """Disable core files and new privileges; the kernel kills this process when its parent's thread ends."""
    _limit(resource.RLIMIT_CORE, 0)
    if (libc := _libc()) is not None:
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def apply_limits() -> None:
    """Set the limits, in addition to what the process has used so far. Call this after all imports."""
    global _allowance
    _limit(resource.RLIMIT_NOFILE, DESCRIPTORS)
    _limit(resource.RLIMIT_FSIZE, 0)
    _allowance = _Allowance(_memory(), MEMORY_BYTES, CPU_S)
    _apply(_allowance)


def raise_limits(*, metadata_bytes: int = 0, data_bytes: int = 0, mapped_bytes: int = 0, file_bytes: int = 0) -> None:
    """Raise the limits by the cost of reading that many bytes, and of writing a file of `file_bytes`."""
    if _allowance is None:
        return
    _allowance.memory_bytes = min(_allowance.memory_bytes + metadata_bytes * MEMORY_PER_BYTE, MAX_MEMORY_BYTES)
    _allowance.mapped_bytes += mapped_bytes
    _allowance.cpu_s += metadata_bytes / METADATA_BYTES_PER_S + data_bytes / DATA_BYTES_PER_S
    if file_bytes:
        _limit(resource.RLIMIT_FSIZE, file_bytes)
    _apply(_allowance)


def limit_message(code: int) -> str:
    """Return which of these limits ended a process with exit code `code`; "" if none."""
    if code in (-signal.SIGXCPU, -signal.SIGALRM):
        return "it took much longer than files of its size do"
    return "it does not fit into memory, or is not in the format that it declares" if code == -signal.SIGSEGV else ""


def _apply(allowed: _Allowance) -> None:
    data_bytes, space_bytes = allowed.base_bytes
    if sys.platform == "linux":
        _limit(resource.RLIMIT_DATA, data_bytes + allowed.memory_bytes)
        # Threads reserve address space that they never touch.
        _limit(resource.RLIMIT_AS, space_bytes + allowed.memory_bytes + allowed.mapped_bytes + (1 << 30))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime + allowed.cpu_s) + 1)
    signal.alarm(min(int(allowed.cpu_s * WALL_S_PER_CPU_S) + 1, 2**31 - 1))


def _limit(kind: int, value: int) -> None:
    """Set the soft limit only: it must be able to grow, and no foreign code that could raise it runs here."""
    with suppress(ValueError, OSError):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _memory() -> tuple[int, int]:
    """Return this process's bytes of writable memory and of address space."""
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
    """Move the process into a new network namespace, which has no connection."""
    if os.geteuid() == 0 and libc.unshare(_NEW_NET) == 0:
        return True
    return bool(libc.unshare(_NEW_USER | _NEW_NET) == 0)


_SYSTEMS = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
"""The kernel's code of the architecture, and the number of socket(2). Source: linux/audit.h, asm/unistd.h."""
_IO_URING_SETUP = 425


def _without_sockets(libc: ctypes.CDLL) -> bool:
    """Make the kernel refuse socket(2) except for Unix sockets, for containers that allow no namespaces.

    The seccomp filter has nine instructions over struct seccomp_data (number at 0, architecture at 4, arguments from
    16).
    """
    if platform.machine() not in _SYSTEMS or sys.platform != "linux":
        return False
    architecture, socket_number = _SYSTEMS[platform.machine()]
    load, equal, ret = 0x20, 0x15, 0x06
    refuse, allow = 0x00050000 | 13, 0x7FFF0000  # EACCES
    program = [
        (load, 0, 0, 4), (equal, 0, 6, architecture),
        (load, 0, 0, 0), (equal, 4, 0, _IO_URING_SETUP), (equal, 0, 2, socket_number),
        (load, 0, 0, 16), (equal, 0, 1, 1),  # AF_UNIX
        (ret, 0, 0, allow), (ret, 0, 0, refuse),
    ]  # fmt: skip
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    filter_program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer)))
    return bool(libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(filter_program), 0, 0) == 0)
