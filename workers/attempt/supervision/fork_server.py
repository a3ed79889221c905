"""Fork server for supervisors: `python -m workers.attempt.supervision.fork_server SOCKET PADDING`.

It has imported what a supervisor needs, so a fork takes milliseconds where a new interpreter takes a hundred. One per
agent; Linux only; standard library only.

A request is a folder's path and three descriptors: the attempt's lock, the pipe to read its secrets from, and the pipe
for the reply, which is the byte `1` or an error message. A forked supervisor is like one that was started in its own
interpreter: in a session of its own, detached from its parent, without other descriptors, and listed under its folder's
name in the process list. It outlives fork server and agent; a fork server ends with its agent.
"""

import ctypes
import gc
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn

MAX_REQUEST_BYTES = 4096
READY = b"1"


def main() -> int:
    request_socket = socket.socket(fileno=int(sys.argv[1]))
    _set_command_line("-m\0workers.attempt.zygote")
    while True:
        folder, descriptors, _, _ = socket.recv_fds(request_socket, MAX_REQUEST_BYTES, 3)
        if not folder:  # the agent has exited
            return 0
        child = os.fork()
        if child == 0:
            _start_supervisor(request_socket, folder.decode(), descriptors)
        os.waitpid(child, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _start_supervisor(request_socket: socket.socket, folder: str, descriptors: list[int]) -> NoReturn:
    """Fork again and exit: the supervisor is then no descendant of the agent, which may kill its own."""
    if os.fork():
        os._exit(0)
    code = 1
    try:
        os.setsid()
        request_socket.close()
        lock, secrets, reply = descriptors
        null = os.open(os.devnull, os.O_WRONLY)
        for source, target in ((secrets, 0), (null, 1), (reply, 2)):
            os.dup2(source, target)
        for descriptor in (secrets, null):
            os.close(descriptor)
        os.chdir(folder)
        _set_command_line(f"-m\0workers.attempt\0{folder}\0{lock}")
        gc.enable()
        code = supervisor.supervise(Path(folder), lock, reply)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _set_command_line(arguments: str) -> None:
    """Change the command line in the process list, by overwriting the arguments.

    PADDING made space for that.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, proc(5)
        text = f"{sys.executable}\0{arguments}".encode()
        if 0 < start < end and len(text) < end - start:
            ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
    except (OSError, ValueError, IndexError):  # the name is for people only
        return


if __name__ == "__main__":
    gc.disable()  # imports leave no garbage
    from workers.attempt.supervision import supervisor

    gc.freeze()
    sys.exit(main())
