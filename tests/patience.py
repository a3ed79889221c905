"""Tests wait for a state, never for a time to pass. What has not happened by the limit never will, on a slow and busy
machine either; no test concludes anything from how long it took.
"""

import os
import time
from collections.abc import Callable, Iterable
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
    """The first true value of `truth`. Raises AssertionError after `limit_s`, or LIMIT_S if that is more, with the last
    value and `what`, which is called if it is a function. Exceptions of the classes `pass_over` count as "not yet".

    The pauses between calls grow to `longest_pause_s`: a request costs 2 ms of a CPU, a look at all processes 10 ms.
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
            reason = what() if callable(what) else what
            raise AssertionError(f"waited {limit_s:.0f} s in vain; last value {seen!r}; {reason}")
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, longest_pause_s)


def sufficient_limit(
    call: Callable[[float], T], suffices: Callable[[T], object], limits_s: Iterable[float]
) -> tuple[float, T]:
    """The first limit, with its result, in which all that does not hang was done. A limit of the product that a test
    has to exceed on purpose cannot be the same on every machine.
    """
    for limit_s in limits_s:
        result = call(limit_s)
        if suffices(result):
            return limit_s, result
    raise AssertionError(f"not even {limit_s:g} s sufficed; last result {result!r}")
