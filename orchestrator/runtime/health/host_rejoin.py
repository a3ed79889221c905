"""Thread that reconnects hosts whose nodes are away."""

import logging
import threading
from collections.abc import Callable, Collection, Mapping

from cluster.hosts.host_rejoin import HostRejoin

log = logging.getLogger(__name__)
INTERVAL_S = 5.0


class RejoinThread(threading.Thread):
    """The reconnecting thread.

    `ready` returns the names of nodes that respond; `repaired` gets a node and a sentence. `waiting`: by node, why its
    host could not be reconnected.
    """

    def __init__(self, ready: Callable[[], Collection[str]], repaired: Callable[[str, str], None]):
        super().__init__(name="rejoin", daemon=True)
        self._ready, self._repaired = ready, repaired
        self._rejoins = HostRejoin(log.warning)
        self._closing = threading.Event()
        self.waiting: Mapping[str, str] = {}

    def run(self) -> None:
        while not self._closing.wait(INTERVAL_S):
            try:
                result = self._rejoins.check(self._ready())
            except Exception:
                log.exception("checking for hosts that are away failed; it will be retried")
                continue
            self.waiting = result.postponed
            for node in result.started:
                self._repaired(node, f"the host of {node} had been away and was joined again")

    def close(self) -> None:
        self._closing.set()
