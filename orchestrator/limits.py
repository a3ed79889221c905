"""What the server takes at a time. Beyond it a request is refused at once, and told after how long to come back."""

import os
from collections.abc import Mapping

from cluster.errors import FleetError, PolyfleetError, UserError

SWITCH = "POLYFLEET_MOST_WAITING"
MOST_WAITING = 1_000_000
MOST_IN_FLIGHT = 512
"""Requests being answered, streams left out: those have a limit of their own."""
MOST_BULK = 1000


class LimitExceeded(PolyfleetError):
    """HTTP 429: the caller asks for more than it may have now. `retry_after_s` becomes the header Retry-After."""

    exit_code = FleetError.exit_code
    retry_after_s = 1


class TooManyJobs(LimitExceeded):
    retry_after_s = 30

    def __init__(self, waiting: int, most: int):
        super().__init__(
            f"{waiting:,} jobs wait already, and at most {most:,} may",
            f"wait until some have ended, or start the server with a larger {SWITCH}",
        )
        self.args = (waiting, most)


class TooManyRequests(LimitExceeded):
    def __init__(self, most: int):
        super().__init__(f"{most} requests are being answered, the most at a time", "ask again in a second")
        self.args = (most,)


def max_waiting_jobs(environment: Mapping[str, str] = os.environ) -> int:
    """How many jobs may wait. Raises UserError for a setting that is not a number."""
    text = environment.get(SWITCH, "") or str(MOST_WAITING)
    if not text.isascii() or not text.isdigit():
        raise UserError(f"{SWITCH}={text!r} is not a number of jobs", f"write a number, such as {MOST_WAITING}")
    return int(text)
