"""Whether an attempt's supervisor lives and obeys, and the end of one that does not.

A supervisor is the process that it recorded, by number and start; whoever else holds its lock proves nothing. Its
parent is its keeper, which only waits for it, adopts what it leaves behind when somebody kills it, and kills that.
"""

import signal
from pathlib import Path
from typing import Any, NamedTuple

from cluster.untrusted_files import UnreadableFile, read_bytes
from workers.attempt import lease, process_tree
from workers.attempt.cgroup import ControlGroup
from workers.attempt.folders import AttemptFolder, read_json, write_json
from workers.attempt.process_tree import Process
from workers.messages import STOPS

LEASE_MARGIN_S = 1.0
"""Past the lease, until we kill the supervisor: it looks four times a second, and kills its ranks at once. A second
later the controller may place the job anew.
"""
STOP_MARGIN_S = 15.0
"""Past a stop's grace: a supervisor waits up to 10 s for ranks that the kernel cannot kill, 1 s for their output."""
CANCEL_GRACE_S = 2.0
REMOVE_S = 2.0
STOP_BYTES = 8
"""Of the stop file, whatever it says: on a full disk its text is written over in place."""


class SupervisorPids(NamedTuple):
    supervisor: Process
    keeper: Process


def write_pids(folder: AttemptFolder, supervisor: Process, keeper: Process) -> None:
    write_json(folder.supervisor, {"pid": supervisor.pid, "supervisor": supervisor, "keeper": keeper})


def read_pids(path: Path) -> SupervisorPids | None:
    """None when there is no record, or none of ours."""
    found: Any = read_json(path)
    try:
        supervisor, keeper = (Process(int(pid), int(ticks), str(boot)) for pid, ticks, boot in _two(found))
    except (TypeError, ValueError, KeyError):
        return None
    return SupervisorPids(supervisor, keeper)


def _two(found: Any) -> tuple[Any, Any]:
    return found["supervisor"], found["keeper"]


def cgroup_of(folder: AttemptFolder) -> ControlGroup | None:
    """The control group that the launch record names; None: the attempt has none."""
    return cgroup_of_record(read_json(folder.launch))


def cgroup_of_record(found: Any) -> ControlGroup | None:
    """That of a launch record."""
    path = found.get("cgroup") if isinstance(found, dict) else None
    return ControlGroup(Path(path)) if isinstance(path, str) and path else None


class SupervisorHandle:
    """What an agent knows of one attempt's supervisor. Found anew by a restarted agent, and remembered: who removes or
    damages the record later gains nothing.
    """

    def __init__(self, folder: AttemptFolder, lease_s: float):
        self._folder = folder
        self._lease = lease.Lease(folder.lease)
        self._lease_s = lease_s
        self._recorded: SupervisorPids | None = None
        self._end_by_s: dict[str, float] = {}

    @property
    def recorded(self) -> SupervisorPids | None:
        if self._recorded is None:
            self._recorded = read_pids(self._folder.supervisor)
        return self._recorded

    def goes_on(self) -> bool:
        """False once the supervisor is gone, or has not ended the attempt when it had to. Without a supervisor's record
        an attempt may still be starting: then its lease is all there is.
        """
        past_s = lease.now_s() - self._lease.deadline_s
        if self.recorded is None:
            return past_s < (LEASE_MARGIN_S if lease.is_locked(self._folder.lock) else 0.0)
        return process_tree.stat_of(self.recorded.supervisor) is not None and past_s < LEASE_MARGIN_S and self._obeys()

    def _obeys(self) -> bool:
        """Counted from when this agent first saw what was asked for."""
        asked = requested_stop(self._folder.stop)
        if asked:
            grace_s = self._grace_s() if asked == "preempt" else CANCEL_GRACE_S
            self._end_by_s.setdefault(asked, lease.now_s() + grace_s + STOP_MARGIN_S)
        return lease.now_s() < min(self._end_by_s.values(), default=float("inf"))

    def _grace_s(self) -> float:
        found: Any = read_json(self._folder.launch)
        return float(found["grace_s"]) if isinstance(found, dict) else 0.0

    def renew(self, asked_s: float | None = None) -> bool:
        """See Lease.renew. A supervisor that is stopped or gone gets nothing: it could not end the attempt in time."""
        if self.recorded is not None:
            found = process_tree.stat_of(self.recorded.supervisor)
            if found is None or found.stopped:
                return False
        return self._lease.renew(self._lease_s, asked_s)

    def wake(self) -> None:
        """Let the supervisor look at once, also one that somebody has stopped."""
        if self.recorded is not None and process_tree.stat_of(self.recorded.supervisor):
            process_tree.send(self.recorded.supervisor.pid, signal.SIGCONT)
            process_tree.send(self.recorded.supervisor.pid, signal.SIGUSR1)

    def end(self) -> None:
        """Kill the supervisor, then all that is left of the attempt, and last the keeper, which they descend from."""
        known = self.recorded
        living = [p.pid for p in known or () if process_tree.stat_of(p)]
        if known and known.supervisor.pid in living:
            process_tree.send(known.supervisor.pid, signal.SIGKILL)
        kill_all(self._folder, living, known.keeper if known else None)
        if group := cgroup_of(self._folder):
            group.remove(REMOVE_S)
        if known and process_tree.stat_of(known.keeper):
            process_tree.send(known.keeper.pid, signal.SIGKILL)


def kill_all(folder: AttemptFolder, roots: list[int], session: Process | None = None) -> set[int]:
    """Every process of the attempt but `roots`: by control group, and by what else shows that it belongs. Returns who
    still lives.
    """
    group = cgroup_of(folder)
    if group is not None:
        group.kill()
    found = group.members if group is not None else set[int]
    return process_tree.kill_tree(lambda: process_tree.tree(roots, folder.shared, session) | found())


def requested_stop(stop: Path) -> str:
    """What the stop file asks for; "" without one. Anything we do not know is `cancel`."""
    try:
        said = read_bytes(stop, 16).strip().decode(errors="replace")
    except FileNotFoundError:
        return ""
    except UnreadableFile:
        return "cancel"
    return said if said in STOPS else "cancel"
