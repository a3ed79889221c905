"""Parent of a supervisor, a subreaper: it kills the orphans of a supervisor that was killed.

Standard library only, as the supervisor.
"""

import os
import signal
from typing import NoReturn

from workers.attempt.supervision import supervisor_handle
from workers.processes import process_tree
from workers.protocol.folders import AttemptFolder


def detach() -> int:
    """Leave the agent's process tree: fork, and return in the child only, in a session of its own.

    Returns a descriptor. The parent exits when the child writes to it, or with exit code 1 if the child dies before. A
    Ray worker that exits kills its children; by then ours must be a grandchild whose parent has exited.
    """
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        os._exit(0 if os.read(reader, 1) else 1)
    os.setsid()
    os.close(reader)
    return writer


def fork_supervisor(folder: AttemptFolder, lock: int, launcher: int) -> None:
    """Fork the supervisor, and return in the child only. Its parent becomes the reaper.

    The reaper waits for the supervisor and, if that was killed, kills its orphans. It adopts them as a subreaper,
    whatever their session and their environment.
    """
    process_tree.adopt_orphans()
    process_tree.set_oom_score(first=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    supervisor = os.fork()
    if supervisor:
        os.close(launcher)
        _wait_and_clean_up(supervisor, folder)
    os.set_inheritable(lock, False)


def _wait_and_clean_up(supervisor: int, folder: AttemptFolder) -> NoReturn:
    null = os.open(os.devnull, os.O_RDWR)
    for target in (0, 1, 2):
        os.dup2(null, target)
    status = None
    while status is None:
        ended, code = os.waitpid(-1, 0)
        status = code if ended == supervisor else None
    if status != 0:
        supervisor_handle.kill_all(folder, [os.getpid()])
        if group := supervisor_handle.cgroup_of(folder):
            group.remove(supervisor_handle.REMOVE_S)
    os._exit(0)
