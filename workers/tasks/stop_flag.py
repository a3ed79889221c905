"""Knowing when to stop: a SIGTERM sets a flag, and all ranks of an attempt come to see it at the same poll."""

import signal
from types import FrameType
from typing import Any

# Ranks that meet in every step are at most a step apart: after this many more polls all have read the number to stop
# at.
AHEAD = 4
KEY = "stop-at"


class StopFlag:
    """`poll()` is asked once per step. `seen` tells whether it ever answered yes.

    With several ranks the first that was asked writes, into a store all share, the poll at which all answer yes: a rank
    that left its loop one step before the others would leave them waiting in a collective for ever.
    """

    def __init__(self) -> None:
        self.asked = False
        self.seen = False
        self._polls = 0
        self._store: Any = None

    def listen(self) -> None:
        """Let SIGTERM set the flag, in place of ending the process."""
        signal.signal(signal.SIGTERM, self._ask)

    def share(self, store: Any) -> None:
        """Agree with other ranks through this store of torch.distributed; None: decide alone."""
        self._store = store

    def poll(self) -> bool:
        self._polls += 1
        self.seen = self.seen or (self.asked if self._store is None else self._agreed())
        return self.seen

    def _agreed(self) -> bool:
        if self.asked:
            self._store.compare_set(KEY, "", str(self._polls + AHEAD))
        return self._store.check([KEY]) and self._polls >= int(self._store.get(KEY))

    def _ask(self, signal_number: int, frame: FrameType | None) -> None:
        self.asked = True
