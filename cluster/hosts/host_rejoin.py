"""Rejoin hosts whose nodes are away, over SSH and with growing pauses, while the fleet is up.

A host that was cut off, or whose nodes ended, does not need this: its own watchdog process restarts the nodes. A host
that was switched off and on again has no watchdog, and a watchdog does not notice that the head was replaced. The
head's host counts as away if nothing listens at the head's address.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from cluster.errors import PolyfleetError
from cluster.fleet import fleet_record
from cluster.fleet.fleet_record import FleetRecord, HostRecord
from cluster.hosts import head
from cluster.nodes.node_repair import RepairResult
from cluster.nodes.ray_head import HEAD

AWAY_S = 20.0
"""Time without a node after which its host counts as away. The watchdog restarts a lost node in half that time."""
FIRST_PAUSE_S, MAX_PAUSE_S = 15.0, 240.0
Join = Callable[[FleetRecord, HostRecord, Callable[[str], None]], None]


@dataclass(slots=True)
class _Away:
    since_s: float
    tries: int = 0
    next_s: float = 0.0
    error: str = ""


class HostRejoin:
    """Rejoins hosts that are away.

    It needs a thread of its own: a call takes as long as ssh waits for a host.
    """

    def __init__(
        self, progress: Callable[[str], None], now_s: Callable[[], float] = time.monotonic, join: Join = head.rejoin
    ):
        self._progress, self._now_s, self._join = progress, now_s, join
        self._away: dict[str, _Away] = {}

    def check(self, ready: Collection[str]) -> RepairResult:
        """Rejoin hosts that are due. `ready` names the nodes that respond.

        Errors are in the result, not raised.
        """
        record = fleet_record.read()
        if record is None or record.state != "up" or record.is_headless:
            self._away.clear()
            return RepairResult()
        return self._check(record, ready)

    def _check(self, record: FleetRecord, ready: Collection[str]) -> RepairResult:
        started, waiting = [], {}
        for host in record.hosts:
            missing = [node for node in host.nodes if node not in ready]
            if host.name == record.head_host and not head.is_listening(record):
                missing.insert(0, HEAD)
            if not missing:
                self._away.pop(host.name, None)
                continue
            away = self._away.setdefault(host.name, _Away(self._now_s()))
            if self._now_s() >= max(away.since_s + AWAY_S, away.next_s):
                started += missing if self._rejoin(record, host, away) else []
            if away.error:
                waiting.update(dict.fromkeys(missing, f"{', '.join(missing)} could not be joined again: {away.error}"))
        return RepairResult(tuple(started), waiting)

    def _rejoin(self, record: FleetRecord, host: HostRecord, away: _Away) -> bool:
        self._progress(f"host {host.host} has been away for {self._now_s() - away.since_s:.0f} s: rejoining it")
        try:
            self._join(record, host, self._progress)
            away.error = ""
        except (PolyfleetError, OSError) as e:
            away.error = e.message if isinstance(e, PolyfleetError) else str(e)
        away.next_s = self._now_s() + min(MAX_PAUSE_S, FIRST_PAUSE_S * 2**away.tries)
        away.tries += 1
        return not away.error
