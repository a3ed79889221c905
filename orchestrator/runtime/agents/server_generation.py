"""Generation of this server's controller, and whether a server that was started later controls the fleet instead."""

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class ServerGeneration:
    """Thread-safe. `number` is sent with each call to an agent; agents refuse one older than the newest they received.

    If a node that has just joined has received a newer generation, ours must be above it. If a node that has already
    obeyed us has received one, it belongs to a server started after this one: `superseded_by` then says so, and our
    number never rises again. Otherwise the other server's nodes would obey our new number, and no server would be left.
    """

    def __init__(self) -> None:
        self.number = 0
        self.superseded_by = ""
        self._minimum = 0
        self._controlled_nodes: set[str] = set()
        self._lock = threading.Lock()

    def handle_obeyed(self, node: str) -> None:
        """Record that a node has accepted a call of ours."""
        self._controlled_nodes.add(node)

    def handle_newest(self, node: str, newest: int) -> None:
        """Handle the newest generation that a node has received."""
        with self._lock:
            if newest <= self.number:
                return
            if node not in self._controlled_nodes:
                self._minimum = max(self._minimum, newest)
            elif not self.superseded_by:
                reason = f"another server, started after this one, has taken over the fleet (node {node} obeys it)"
                self.superseded_by = f"{reason}; run `polyfleet server stop` to stop this one"
                log.error("%s: its generation is %d, ours is %d", reason, newest, self.number)

    def rise(self, next_generation: Callable[[int], int]) -> None:
        """Raise the number above all that joining nodes have received.

        `next_generation(floor)` stores and returns a new one. It may wait for the store, so it is called without the
        lock.
        """
        if self.superseded_by or self._minimum <= self.number:
            return
        number = next_generation(self._minimum)
        with self._lock:
            if not self.superseded_by:
                self.number = number
