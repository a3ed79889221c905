"""Restart lost nodes of an embedded fleet that is up.

The server does this on its own machine; for other machines see joined_nodes.py. Ray ends a node's other processes
within 3 s of its raylet's end, and the head's within 2 s of its state server's end.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.environments import environments
from cluster.errors import Conflict, PolyfleetError
from cluster.fleet import fleet_record
from cluster.fleet.fleet_record import FleetRecord
from cluster.host.processes import stop
from cluster.nodes import embedded
from cluster.nodes.ray_head import HEAD
from cluster.nodes.raylets import log_of, log_tail, start_worker

END_S = 5.0
"""Time for a node to stop. One without attempts stops within a second of SIGTERM."""

WINDOW_S = 600.0
PAUSES_S = (0.0, 10.0, 60.0)
"""Pauses before the first, second and third start of a node within WINDOW_S. The fourth waits until the first is older
than WINDOW_S.
"""


@dataclass(frozen=True, slots=True)
class RepairResult:
    """Result of one check.

    `started` names the nodes started just now, which join some 3 s later. `waiting` has, by node, the reason why a lost
    node was not started.
    """

    started: tuple[str, ...] = ()
    postponed: Mapping[str, str] = field(default_factory=dict)


class NodeRepair:
    """Restarts lost nodes, with pauses, and remembers when it did.

    It needs a thread of its own: a call takes milliseconds while nothing is lost, a tenth of a second per lost node,
    and 2 s to two minutes for a lost head.
    """

    def __init__(self, progress: embedded.Progress, now_s: Callable[[], float] = time.monotonic):
        self._progress, self._now_s = progress, now_s
        self._starts: dict[str, list[float]] = {}

    def restart_lost_nodes(self) -> RepairResult:
        """Restart the ended nodes of a fleet whose state is `up`. Errors are in the result, not raised.

        Does nothing while `polyfleet up` or `down` is running; a command that starts during a restart waits for it.
        """
        try:
            if not lost_nodes(fleet_record.read()):
                return RepairResult()
            with embedded.fleet_lock(embedded.REPAIR_MARK):
                record = fleet_record.read()
                return self._repair(record, lost_nodes(record)) if record is not None else RepairResult()
        except Conflict:
            return RepairResult()
        except (PolyfleetError, OSError) as e:
            return RepairResult(postponed={HEAD: str(e)})

    def is_delayed(self, node: str) -> bool:
        """Return whether the node was started so often lately that its next start has to wait."""
        return backoff_left_s(self._recent(node), self._now_s()) > 0.0

    def _recent(self, node: str) -> list[float]:
        return [t for t in self._starts.get(node, ()) if self._now_s() - t < WINDOW_S]

    def stop_node(self, node: str) -> None:
        """Stop a worker node of the embedded fleet, on which nothing may run; `restart_lost_nodes` starts it again.

        The node gets SIGTERM before it is killed, so that it notifies Ray's head of its end. A head whose wall clock
        was set back would not notice otherwise that the node has gone, and the new node has the same name.
        """
        record = fleet_record.read()
        if record is not None and record.is_embedded and record.state == "up":
            stop([p.process for p in record.processes if p.node == node and p.role == "worker"], END_S)

    def _repair(self, record: FleetRecord, nodes: Sequence[str]) -> RepairResult:
        started, waiting = [], {}
        for node in nodes:
            recent = self._recent(node)
            if pause_s := backoff_left_s(recent, self._now_s()):
                waiting[node] = _delay_message(node, len(recent), pause_s)
                continue
            self._starts[node] = [*recent, self._now_s()]
            self._progress(f"{node} of fleet {record.name} has ended: restarting it")
            try:
                record = _with_head(record, self._progress) if node == HEAD else _restart_node(record, node)
                started.append(node)
            except (PolyfleetError, OSError) as e:
                waiting[node] = f"node {node} ended and could not be restarted: {e}"
        return RepairResult(tuple(started), waiting)


def lost_nodes(record: FleetRecord | None) -> tuple[str, ...]:
    """Return the nodes that a fleet whose state is `up` should have and has not.

    Only the head if that is lost: without it the other nodes are useless. A new head counts as lost until it has its
    nodes, because the process that was starting them may have been killed.
    """
    if record is None or not record.is_embedded or (record.state != "up" and not record.previous_temp_dir):
        return ()
    if record.is_headless or record.previous_temp_dir:
        return (HEAD,)
    running = {p.node for p in record.running()}
    return tuple(node for node in embedded.declared_nodes(embedded.spec_of(record), record.host) if node not in running)


def backoff_left_s(starts: Sequence[float], now_s: float) -> float:
    """Return the seconds until the next start. `starts` has the starts within WINDOW_S, oldest first."""
    if len(starts) < len(PAUSES_S):
        return max(0.0, starts[-1] + PAUSES_S[len(starts)] - now_s) if starts else 0.0
    return starts[-len(PAUSES_S)] + WINDOW_S - now_s


def _delay_message(node: str, starts: int, pause_s: float) -> str:
    message = f"node {node} ended again after {starts} restarts within {WINDOW_S / 60:.0f} minutes"
    return (
        f"{message}; the next start is in {pause_s:.0f} s; run `polyfleet up` to start it now; {log_tail(log_of(node))}"
    )


def _restart_node(record: FleetRecord, node: str) -> FleetRecord:
    spec = embedded.spec_of(record)
    name, number = embedded.declared_nodes(spec, record.host)[node]
    return start_worker(record, spec, (name, number), environments.path(spec.pools[name].environment))


def _with_head(record: FleetRecord, progress: embedded.Progress) -> FleetRecord:
    """Restart the head and every node that has ended. If this fails, the next check tries again."""
    spec = embedded.spec_of(record).local_part()
    interpreters = {name: environments.path(pool.environment) for name, pool in spec.pools.items()}
    return embedded.start_with_head(record, spec, interpreters, progress)
