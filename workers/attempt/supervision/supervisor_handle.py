"""Check that an attempt's supervisor runs and follows requests, and kill one that does not.

A supervisor is the process in its record, by pid and start time; its lock proves nothing, as another process may hold
it. Its parent is its reaper, which waits for it and, if it was killed, kills its orphans.
"""

import signal
from pathlib import Path
from typing import Any, NamedTuple

from cluster.input.untrusted_files import UnreadableFile, read_bytes
from workers.processes import process_tree
from workers.processes.cgroup import ControlGroup
from workers.processes.process_tree import Process
from workers.protocol import lease
from workers.protocol.folders import AttemptFolder, read_json, write_json
from workers.protocol.messages import STOPS

LEASE_MARGIN_S = 1.0
"""Time from the end of the lease until we kill the supervisor, which checks its lease four times a second and then
kills its ranks at once. A second later the controller may place the job again.
"""
STOP_MARGIN_S = 15.0
"""Time that a supervisor gets after the grace of a stop: it waits up to 10 s for the kernel to kill ranks, and 1 s for
their output."""
CANCEL_GRACE_S = 2.0
REMOVE_S = 2.0
STOP_BYTES = 8
"""Size of the stop file, whatever its text: on a full disk it is overwritten in place."""


class SupervisorPids(NamedTuple):
    supervisor: Process
    reaper: Process


def write_pids(folder: AttemptFolder, supervisor: Process, reaper: Process) -> None:
    write_json(folder.supervisor, {"pid": supervisor.pid, "supervisor": supervisor, "reaper": reaper})


def read_pids(path: Path) -> SupervisorPids | None:
    """Read the record of the supervisor; None if there is none or it is invalid."""
    data: Any = read_json(path)
    try:
        supervisor, reaper = (Process(int(pid), int(ticks), str(boot)) for pid, ticks, boot in _pair(data))
    except (TypeError, ValueError, KeyError):
        return None
    return SupervisorPids(supervisor, reaper)


def _pair(data: Any) -> tuple[Any, Any]:
    return data["supervisor"], data["reaper"]


def cgroup_of(folder: AttemptFolder) -> ControlGroup | None:
    """The control group of the attempt, by its launch record; None if it has none."""
    return cgroup_of_record(read_json(folder.launch))


def cgroup_of_record(record: Any) -> ControlGroup | None:
    """The control group that a launch record names; None if it names none."""
    path = record.get("cgroup") if isinstance(record, dict) else None
    return ControlGroup(Path(path)) if isinstance(path, str) and path else None


class SupervisorHandle:
    """The supervisor of one attempt, for the agent.

    The record is read once and cached: later damage has no effect.
    """

    def __init__(self, folder: AttemptFolder, lease_s: float):
        self._folder = folder
        self._lease = lease.Lease(folder.lease)
        self._lease_s = lease_s
        self._pids: SupervisorPids | None = None
        self._end_by_s: dict[str, float] = {}

    @property
    def pids(self) -> SupervisorPids | None:
        if self._pids is None:
            self._pids = read_pids(self._folder.supervisor)
        return self._pids

    def is_healthy(self) -> bool:
        """Return False if the supervisor has ended, or did not end the attempt in time.

        Without a record the attempt may still be starting: then only its lease counts.
        """
        past_s = lease.now_s() - self._lease.deadline_s
        if self.pids is None:
            return past_s < (LEASE_MARGIN_S if lease.is_locked(self._folder.lock) else 0.0)
        return (
            process_tree.status_of(self.pids.supervisor) is not None
            and past_s < LEASE_MARGIN_S
            and self._follows_stop()
        )

    def _follows_stop(self) -> bool:
        """Return False if a stop request is overdue, counted from when this agent first saw it."""
        requested = requested_stop(self._folder.stop)
        if requested:
            grace_s = self._grace_s() if requested == "preempt" else CANCEL_GRACE_S
            self._end_by_s.setdefault(requested, lease.now_s() + grace_s + STOP_MARGIN_S)
        return lease.now_s() < min(self._end_by_s.values(), default=float("inf"))

    def _grace_s(self) -> float:
        launch: Any = read_json(self._folder.launch)
        return float(launch["grace_s"]) if isinstance(launch, dict) else 0.0

    def renew(self, requested_s: float | None = None) -> bool:
        """Renew the lease, see Lease.renew, unless its supervisor is stopped or gone: it could not enforce it."""
        if self.pids is not None:
            status = process_tree.status_of(self.pids.supervisor)
            if status is None or status.is_stopped:
                return False
        return self._lease.renew(self._lease_s, requested_s)

    def wake(self) -> None:
        """Let the supervisor check for requests at once, even if it was stopped by a signal."""
        if self.pids is not None and process_tree.status_of(self.pids.supervisor):
            process_tree.send(self.pids.supervisor.pid, signal.SIGCONT)
            process_tree.send(self.pids.supervisor.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """Kill the supervisor, then all other processes of the attempt, and last the reaper, their ancestor."""
        pids = self.pids
        running_pids = [p.pid for p in pids or () if process_tree.status_of(p)]
        if pids and pids.supervisor.pid in running_pids:
            process_tree.send(pids.supervisor.pid, signal.SIGKILL)
        kill_all(self._folder, running_pids, pids.reaper if pids else None)
        if group := cgroup_of(self._folder):
            group.remove(REMOVE_S)
        if pids and process_tree.status_of(pids.reaper):
            process_tree.send(pids.reaper.pid, signal.SIGKILL)


def kill_all(folder: AttemptFolder, roots: list[int], session: Process | None = None) -> set[int]:
    """Kill every process of the attempt but `roots`, by control group and process tree.

    Returns the survivors.
    """
    group = cgroup_of(folder)
    if group is not None:
        group.kill()
    members = group.members if group is not None else set[int]
    return process_tree.kill_tree(lambda: process_tree.attempt_processes(roots, folder.shared, session) | members())


def requested_stop(stop: Path) -> str:
    """Read the stop file; "" if there is none. Any unknown text counts as `cancel`."""
    try:
        text = read_bytes(stop, 16).strip().decode(errors="replace")
    except FileNotFoundError:
        return ""
    except UnreadableFile:
        return "cancel"
    return text if text in STOPS else "cancel"
