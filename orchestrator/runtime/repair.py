"""The thread that starts again what the embedded fleet has lost, and nodes that are to be. A cluster that others run is
theirs to repair.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from cluster.node_repair import NodeRepair

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.2
"""A look takes a millisecond; attempts on a lost node have one lease until its next agent is there."""
REST_S = 5.0
"""After a look that failed for a reason that nobody foresaw: the next one may fail alike."""
SWITCH = "POLYFLEET_REPAIR"
ASKED_S = 10.0
"""A node is to be ended at once or not at all: while a head is being started again, jobs may be placed there anew."""


def wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """POLYFLEET_REPAIR=off leaves lost nodes as they are, for whoever wants to look at them."""
    return environment.get(SWITCH, "").lower() not in ("off", "0", "false", "no")


class RepairThread(threading.Thread):
    """`repaired` gets a node and a sentence. `waiting` says by node why a lost one is not started now."""

    def __init__(self, repaired: Callable[[str, str], None]):
        super().__init__(name="repair", daemon=True)
        self._repaired = repaired
        self._repairs = NodeRepair(log.warning)
        self._closing = threading.Event()
        self._asked: deque[tuple[float, str, str]] = deque()
        self._ended: dict[str, str] = {}
        self.waiting: Mapping[str, str] = {}

    def restart(self, node: str, why: str) -> bool:
        """End that node, on which nothing runs, and start it again. Does not wait. False where that was done too often
        lately: ended, it would be away for minutes.
        """
        if self._repairs.is_held(node):
            return False
        self._asked.append((time.monotonic(), node, why))
        return True

    def run(self) -> None:
        failed = 0
        while not self._closing.wait(REST_S if failed else LOOK_EVERY_S):
            try:
                self._end()
                done = self._repairs.restart_lost()
            except Exception:
                failed += 1
                if failed & (failed - 1) == 0:  # the 1st, 2nd, 4th, 8th, … time
                    log.exception("looking for lost nodes failed %d times; it is tried every %.0f s", failed, REST_S)
                continue
            failed, self.waiting = 0, done.waiting
            for node in done.started:
                self._repaired(node, self._ended.pop(node, f"node {node} had ended and was started again"))

    def _end(self) -> None:
        while self._asked:
            asked_s, node, why = self._asked.popleft()
            if time.monotonic() - asked_s < ASKED_S:
                self._repairs.end(node)
                self._ended[node] = why

    def close(self) -> None:
        self._closing.set()
