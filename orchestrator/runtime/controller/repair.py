"""Thread that restarts lost parts of our own fleet, and nodes on request.

Clusters of others are not repaired.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from cluster.nodes.node_repair import NodeRepair

log = logging.getLogger(__name__)

INTERVAL_S = 0.2
"""A check takes a millisecond. Attempts on a lost node end with their lease unless its next agent is up by then."""
PAUSE_AFTER_FAILURE_S = 5.0
"""Pause after a check with an unexpected error: the next one may fail like it."""
SWITCH = "POLYFLEET_REPAIR"
REQUEST_AGE_S = 10.0
"""Requests older than this are dropped: while the head was restarting, jobs may have been placed on the node."""


def is_enabled(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether repair is on.

    POLYFLEET_REPAIR=off leaves lost nodes as they are, so that they can be inspected.
    """
    return environment.get(SWITCH, "").lower() not in ("off", "0", "false", "no")


class RepairThread(threading.Thread):
    """The repair thread.

    `repaired` gets a node and a sentence. `waiting`: by node, why it is not restarted now.
    """

    def __init__(self, repaired: Callable[[str, str], None]):
        super().__init__(name="repair", daemon=True)
        self._repaired = repaired
        self._repairs = NodeRepair(log.warning)
        self._closing = threading.Event()
        self._requests: deque[tuple[float, str, str]] = deque()
        self._end_reasons: dict[str, str] = {}
        self.waiting: Mapping[str, str] = {}

    def restart(self, node: str, reason: str) -> bool:
        """Request that an idle node is ended and restarted; does not wait.

        Returns False if the node was restarted too often lately: it would then stay down for minutes.
        """
        if self._repairs.is_delayed(node):
            return False
        self._requests.append((time.monotonic(), node, reason))
        return True

    def run(self) -> None:
        failures = 0
        while not self._closing.wait(PAUSE_AFTER_FAILURE_S if failures else INTERVAL_S):
            try:
                self._end_requested()
                result = self._repairs.restart_lost_nodes()
            except Exception:
                failures += 1
                if failures & (failures - 1) == 0:  # the 1st, 2nd, 4th, 8th, … time
                    log.exception(
                        "checking for lost nodes failed %d times; retrying every %.0f s",
                        failures,
                        PAUSE_AFTER_FAILURE_S,
                    )
                continue
            failures, self.waiting = 0, result.postponed
            for node in result.started:
                self._repaired(node, self._end_reasons.pop(node, f"node {node} had ended and was started again"))

    def _end_requested(self) -> None:
        while self._requests:
            requested_s, node, reason = self._requests.popleft()
            if time.monotonic() - requested_s < REQUEST_AGE_S:
                self._repairs.stop_node(node)
                self._end_reasons[node] = reason

    def close(self) -> None:
        self._closing.set()
