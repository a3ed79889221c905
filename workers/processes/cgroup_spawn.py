"""Start a program directly in a control group, as Linux can.

Moving a process into a group later waits for every CPU, 5 to 20 ms. Source: clone(2), CLONE_INTO_CGROUP, since Linux
5.7. For single-threaded callers, as every fork. Standard library only.
"""

import ctypes
import errno
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, NoReturn

from workers.processes.process_tree import LINUX

CLONE3, INTO_CGROUP = 435, 0x200000000
_ARGUMENTS = ctypes.c_uint64 * 11  # struct clone_args up to its field `cgroup`
_EXIT_SIGNAL, _CGROUP = 4, 10


class StartedProcess(NamedTuple):
    """A started process; `out` and `err` are non-blocking descriptors to read its stdout and stderr from."""

    pid: int
    stdout: int
    stderr: int


def start(
    command: Sequence[str], environ: Mapping[str, str], folder: str, group: int | None, before_exec: Callable[[], None]
) -> StartedProcess:
    """Start a program in a process group of its own, without input.

    `group` is a descriptor of a control group's folder; `before_exec` runs in the child before exec. Raises OSError
    when the program cannot be started.
    """
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    out, child_out = os.pipe()
    err, child_err = os.pipe()

    def in_own_group() -> None:
        os.setpgid(0, 0)
        before_exec()

    try:
        pid = start_with_streams(command, environ, folder, group, in_own_group, (null, child_out, child_err))
    except OSError:
        os.close(out)
        os.close(err)
        raise
    finally:
        for descriptor in (null, child_out, child_err):
            os.close(descriptor)
    os.set_blocking(out, False)
    os.set_blocking(err, False)
    return StartedProcess(pid, out, err)


def start_with_streams(
    command: Sequence[str],
    environ: Mapping[str, str],
    folder: str,
    group: int | None,
    before_exec: Callable[[], None],
    streams: tuple[int, int, int],
) -> int:
    """Like `start`, but with these stdin, stdout and stderr, and in the process group that `before_exec` sets."""
    error_reader, error_writer = os.pipe()
    pid = _fork(group)
    if pid == 0:
        _exec(command, environ, folder, streams, error_writer, before_exec)
    os.close(error_writer)
    with os.fdopen(error_reader, "rb") as f:
        error = f.read()
    if error:
        os.waitpid(pid, 0)
        raise OSError(int(error), os.strerror(int(error)))
    return pid


def _exec(
    command: Sequence[str],
    environ: Mapping[str, str],
    folder: str,
    streams: tuple[int, int, int],
    error_writer: int,
    before_exec: Callable[[], None],
) -> NoReturn:
    try:
        for target, source in enumerate(streams):
            os.dup2(source, target)
        before_exec()
        os.chdir(folder)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python had set them to be ignored
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(command[0], list(command), environ)  # noqa: S606 - a shell runs only if the job's command is one
    except OSError as e:
        os.write(error_writer, str(e.errno or errno.EIO).encode())
    except (ValueError, TypeError):  # a zero byte in an argument or a variable
        os.write(error_writer, str(errno.EINVAL).encode())
    finally:
        os._exit(127)


def _fork(group: int | None) -> int:
    """Fork into the group; return 0 in the child.

    If the kernel or a container refuses to start it in the group, the child moves itself there.
    """
    pid = _clone_into_group(group) if group is not None and LINUX else -1
    if pid >= 0:
        return pid
    pid = os.fork()
    if pid == 0 and group is not None:
        with suppress(OSError):
            procs = os.open("cgroup.procs", os.O_WRONLY | os.O_CLOEXEC, dir_fd=group)
            os.write(procs, b"0")
    return pid


def _clone_into_group(group: int) -> int:
    """Do what os.fork does, with clone3 as the system call. Returns -1 if the kernel refuses."""
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
