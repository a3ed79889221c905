"""Stop flag: SIGTERM sets it, and all ranks of an attempt see it at the same poll."""

import signal
from types import FrameType
from typing import Any

# Ranks synchronize in every step, so they differ by at most one step. After this many more polls, all have read the
# poll number at which to stop.
AHEAD = 4
KEY = "stop-at"


class StopFlag:
    """Flag that a rank polls once per step. `is_observed` is True once `poll()` has returned True.

    With several ranks, the first that receives SIGTERM writes to a shared store the poll number at which all return
    True: a rank that left its loop one step before the others would leave them waiting in a collective forever.
    """

    def __init__(self) -> None:
        self.requested = False
        self.is_observed = False
        self._polls = 0
        self._store: Any = None

    def listen(self) -> None:
        """Let SIGTERM set the flag instead of ending the process."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def share(self, store: Any) -> None:
        """Coordinate with other ranks through this store of torch.distributed; None: this rank decides alone."""
        self._store = store

    def poll(self) -> bool:
        self._polls += 1
        self.is_observed = self.is_observed or (self.requested if self._store is None else self._is_agreed())
        return self.is_observed

    def _is_agreed(self) -> bool:
        if self.requested:
            self._store.compare_set(KEY, "", str(self._polls + AHEAD))
        return self._store.check([KEY]) and self._polls >= int(self._store.get(KEY))

    def _on_signal(self, signal_number: int, frame: FrameType | None) -> None:
        self.requested = True
