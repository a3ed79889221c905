"""Supervisors by fork: `python -m workers.attempt.fork_server SOCKET PADDING` has imported what a supervisor needs, and
makes one in milliseconds where an interpreter takes a hundred. One per agent; Linux only; standard library only.

Each request is a folder's path and three descriptors: the attempt's lock, where its secrets come from, and where its
success, the byte `1`, or its last words go. A supervisor ends up as one that was started by itself: in a session of its
own, a child of nobody who knows it, with no other descriptor, and named by its folder in the list of processes. It
outlives zygote and agent; a zygote ends with its agent.
"""

import ctypes
import gc
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn

LONGEST_REQUEST = 4096
READY = b"1"


def main() -> int:
    door = socket.socket(fileno=int(sys.argv[1]))
    _rename("-m\0workers.attempt.zygote")
    while True:
        folder, given, _, _ = socket.recv_fds(door, LONGEST_REQUEST, 3)
        if not folder:  # the agent is gone
            return 0
        child = os.fork()
        if child == 0:
            _leave(door, folder.decode(), given)
        os.waitpid(child, 0)
        for descriptor in given:
            os.close(descriptor)


def _leave(door: socket.socket, folder: str, given: list[int]) -> NoReturn:
    """The child forks once more and ends: the agent's end, which may kill its children, reaches no further."""
    if os.fork():
        os._exit(0)
    code = 1
    try:
        os.setsid()
        door.close()
        lock, secrets, said = given
        null = os.open(os.devnull, os.O_WRONLY)
        for source, target in ((secrets, 0), (null, 1), (said, 2)):
            os.dup2(source, target)
        for descriptor in (secrets, null):
            os.close(descriptor)
        os.chdir(folder)
        _rename(f"-m\0workers.attempt\0{folder}\0{lock}")
        gc.enable()
        code = supervisor.supervise(Path(folder), lock, said)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _rename(arguments: str) -> None:
    """What the list of processes shows of us: written over the arguments that we were started with, as long as they."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, proc(5)
        text = f"{sys.executable}\0{arguments}".encode()
        if 0 < begin < end and len(text) < end - begin:
            ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)
    except (OSError, ValueError, IndexError):  # it is a name only
        return


if __name__ == "__main__":
    gc.disable()  # imports leave no garbage
    from workers.attempt import supervisor

    gc.freeze()
    sys.exit(main())
