"""Starting again what the embedded fleet that is up has lost: from within the server, on other machines by a keeper.

Ray ends a node's other processes within 3 s of its raylet's end, and the head's within 2 s of its state server's.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster import embedded, environments, fleet_record
from cluster.errors import Conflict, PolyfleetError
from cluster.fleet_record import FleetRecord
from cluster.processes import stop
from cluster.ray_head import HEAD
from cluster.raylets import log_of, log_tail, start_worker

END_S = 5.0
"""A node without attempts ends within a second of being told to."""

WINDOW_S = 600.0
PAUSES_S = (0.0, 10.0, 60.0)
"""Before the first, the second and the third start of a node within WINDOW_S. A fourth waits until the first is older
than that.
"""


@dataclass(frozen=True, slots=True)
class RepairResult:
    """`started` names the nodes started just now, which join some 3 s later. `waiting` says by node why a lost one is
    not started.
    """

    started: tuple[str, ...] = ()
    waiting: Mapping[str, str] = field(default_factory=dict)


class NodeRepair:
    """Remembers what was started again and when. For one thread that does nothing else: a call takes milliseconds while
    nothing is lost, a tenth of a second per lost node, 2 s and up to two minutes for a lost head.
    """

    def __init__(self, progress: embedded.Progress, now_s: Callable[[], float] = time.monotonic):
        self._progress, self._now_s = progress, now_s
        self._starts: dict[str, list[float]] = {}

    def restart_lost(self) -> RepairResult:
        """Start again what has ended of a fleet whose state is `up`. What goes wrong is in the answer, not raised.

        Nothing is done while `polyfleet up` or `down` is at work; one that comes meanwhile waits for this to end.
        """
        try:
            if not lost_nodes(fleet_record.read()):
                return RepairResult()
            with embedded.fleet_lock(embedded.REPAIR):
                record = fleet_record.read()
                return self._repair(record, lost_nodes(record)) if record is not None else RepairResult()
        except Conflict:
            return RepairResult()
        except (PolyfleetError, OSError) as e:
            return RepairResult(waiting={HEAD: str(e)})

    def is_held(self, node: str) -> bool:
        """Whether it was started so often lately that it would have to wait for its next start."""
        return backoff_left_s(self._recent(node), self._now_s()) > 0.0

    def _recent(self, node: str) -> list[float]:
        return [t for t in self._starts.get(node, ()) if self._now_s() - t < WINDOW_S]

    def end(self, node: str) -> None:
        """End all of a node of the embedded fleet, which `restart_lost` starts again. Nothing is to run there.

        It is told before it is killed, and tells Ray's head in turn: a head whose wall clock was set back does not
        notice otherwise that the node has gone, and its successor bears the same name.
        """
        record = fleet_record.read()
        if record is not None and record.embedded and record.state == "up":
            stop([p.process for p in record.processes if p.node == node and p.role == "worker"], END_S)

    def _repair(self, record: FleetRecord, nodes: Sequence[str]) -> RepairResult:
        started, waiting = [], {}
        for node in nodes:
            recent = self._recent(node)
            if pause_s := backoff_left_s(recent, self._now_s()):
                waiting[node] = _sentence(node, len(recent), pause_s)
                continue
            self._starts[node] = [*recent, self._now_s()]
            self._progress(f"{node} of fleet {record.name} has ended: starting it again")
            try:
                record = _with_head(record, self._progress) if node == HEAD else _again(record, node)
                started.append(node)
            except (PolyfleetError, OSError) as e:
                waiting[node] = f"node {node} ended and could not be started again: {e}"
        return RepairResult(tuple(started), waiting)


def lost_nodes(record: FleetRecord | None) -> tuple[str, ...]:
    """Nodes that a fleet whose state is `up` should have and has not; without its head all others are useless. A new
    head is lost until it has its nodes: whoever began to start them may have been killed.
    """
    if record is None or not record.embedded or (record.state != "up" and not record.before):
        return ()
    if record.headless or record.before:
        return (HEAD,)
    living = {p.node for p in record.living()}
    return tuple(node for node in embedded.declared_nodes(embedded.spec_of(record), record.host) if node not in living)


def backoff_left_s(starts: Sequence[float], now_s: float) -> float:
    """Seconds until the next start, given the times of those within WINDOW_S, oldest first."""
    if len(starts) < len(PAUSES_S):
        return max(0.0, starts[-1] + PAUSES_S[len(starts)] - now_s) if starts else 0.0
    return starts[-len(PAUSES_S)] + WINDOW_S - now_s


def _sentence(node: str, starts: int, pause_s: float) -> str:
    often = f"node {node} ended again after {starts} restarts within {WINDOW_S / 60:.0f} minutes"
    return f"{often}; the next start is in {pause_s:.0f} s, or at once by `polyfleet up`; {log_tail(log_of(node))}"


def _again(record: FleetRecord, node: str) -> FleetRecord:
    spec = embedded.spec_of(record)
    name, number = embedded.declared_nodes(spec, record.host)[node]
    return start_worker(record, spec, (name, number), environments.path(spec.pools[name].environment))


def _with_head(record: FleetRecord, progress: embedded.Progress) -> FleetRecord:
    """And with every node that has ended. When it fails, the next look finds no head again."""
    spec = embedded.spec_of(record).here()
    interpreters = {name: environments.path(pool.environment) for name, pool in spec.pools.items()}
    return embedded.start_with_head(record, spec, interpreters, progress)
