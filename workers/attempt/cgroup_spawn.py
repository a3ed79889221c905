"""Starts a program in a control group. Linux can start it there; moving a process waits for every CPU, 5 to 20 ms.

Source: clone(2), CLONE_INTO_CGROUP, since Linux 5.7. For single-threaded callers, as every fork. Standard library only.
"""

import ctypes
import errno
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, NoReturn

from workers.attempt.process_tree import LINUX

CLONE3, INTO_CGROUP = 435, 0x200000000
_ARGUMENTS = ctypes.c_uint64 * 11  # struct clone_args up to its field `cgroup`
_EXIT_SIGNAL, _CGROUP = 4, 10


class Started(NamedTuple):
    """Descriptors to read its stdout and its stderr from, not blocking."""

    pid: int
    out: int
    err: int


def start(
    command: Sequence[str], environ: Mapping[str, str], folder: str, group: int | None, before: Callable[[], None]
) -> Started:
    """In a process group of its own, without input. `group` is a descriptor of a control group's folder; `before` runs
    in the child. Raises OSError when the program cannot be started.
    """
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    out, child_out = os.pipe()
    err, child_err = os.pipe()

    def alone() -> None:
        os.setpgid(0, 0)
        before()

    try:
        pid = start_with(command, environ, folder, group, alone, (null, child_out, child_err))
    except OSError:
        os.close(out)
        os.close(err)
        raise
    finally:
        for descriptor in (null, child_out, child_err):
            os.close(descriptor)
    os.set_blocking(out, False)
    os.set_blocking(err, False)
    return Started(pid, out, err)


def start_with(
    command: Sequence[str],
    environ: Mapping[str, str],
    folder: str,
    group: int | None,
    before: Callable[[], None],
    streams: tuple[int, int, int],
) -> int:
    """The same with these descriptors as input, output and errors, in the process group that `before` puts it in."""
    said, child_says = os.pipe()
    pid = _fork(group)
    if pid == 0:
        _become(command, environ, folder, streams, child_says, before)
    os.close(child_says)
    with os.fdopen(said, "rb") as f:
        number = f.read()
    if number:
        os.waitpid(pid, 0)
        raise OSError(int(number), os.strerror(int(number)))
    return pid


def _become(
    command: Sequence[str],
    environ: Mapping[str, str],
    folder: str,
    streams: tuple[int, int, int],
    says: int,
    before: Callable[[], None],
) -> NoReturn:
    try:
        for target, source in enumerate(streams):
            os.dup2(source, target)
        before()
        os.chdir(folder)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(command[0], list(command), environ)  # noqa: S606 - a shell runs only where the job asks for one
    except OSError as e:
        os.write(says, str(e.errno or errno.EIO).encode())
    except (ValueError, TypeError):  # a zero byte in an argument or a variable
        os.write(says, str(errno.EINVAL).encode())
    finally:
        os._exit(127)


def _fork(group: int | None) -> int:
    """0 in the child. Where the kernel or a container refuses to start it in the group, the child moves there."""
    pid = _clone_into(group) if group is not None and LINUX else -1
    if pid >= 0:
        return pid
    pid = os.fork()
    if pid == 0 and group is not None:
        with suppress(OSError):
            procs = os.open("cgroup.procs", os.O_WRONLY | os.O_CLOEXEC, dir_fd=group)
            os.write(procs, b"0")
    return pid


def _clone_into(group: int) -> int:
    """As os.fork does it, but for the system call; -1 when the kernel refuses."""
    arguments = _ARGUMENTS()
    arguments[0], arguments[_EXIT_SIGNAL], arguments[_CGROUP] = INTO_CGROUP, signal.SIGCHLD, group
    python, libc = ctypes.pythonapi, ctypes.PyDLL(None)  # PyDLL keeps the interpreter's lock
    python.PyOS_BeforeFork()
    pid = int(libc.syscall(CLONE3, ctypes.byref(arguments), ctypes.c_size_t(ctypes.sizeof(arguments))))
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid
