"""How long tests wait: for a named state, never for a time to pass. What has not happened by the limit never will, on a
slow and busy machine either; nothing is concluded from how long it took.
"""

import os
import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE = float(os.environ.get("POLYFLEET_TEST_PATIENCE", "1"))
"""Every limit times this: 4 for an emulated machine, or one with ten times the load."""
LIMIT_S = 90.0 * PATIENCE
T = TypeVar("T")


def wait_for(
    truth: Callable[[], T],
    what: object = "",
    limit_s: float = 0.0,
    pass_over: tuple[type[Exception], ...] = (),
    longest_pause_s: float = 0.1,
) -> T:
    """The first true value of `truth`; AssertionError with the last one after
    `limit_s`, or LIMIT_S if that is more. `what` is said then, and
    called for it if it can be. Exceptions `pass_over` count as "not yet".

    What takes long is asked for less often: a question costs two milliseconds of a CPU, a look at all processes ten.
    """
    limit_s = max(limit_s * PATIENCE, LIMIT_S)
    deadline, pause_s = time.monotonic() + limit_s, 0.01
    while True:
        seen: object
        try:
            if seen := truth():
                return seen
        except pass_over as e:
            seen = e
        if time.monotonic() > deadline:
            told = what() if callable(what) else what
            raise AssertionError(f"waited {limit_s:.0f} s in vain, last seen {seen!r}; {told}")
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, longest_pause_s)
