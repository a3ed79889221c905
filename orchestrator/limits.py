"""Limits of the server. A request beyond a limit is refused at once, with the seconds after which to retry."""

import os
from collections.abc import Mapping

from cluster.errors import FleetError, PolyfleetError, UserError

VARIABLE = "POLYFLEET_MAX_WAITING_JOBS"
MAX_WAITING_JOBS = 1_000_000
MAX_CONCURRENT_REQUESTS = 512
"""Requests in progress, without streams, which have a separate limit."""
MAX_BULK_JOBS = 1000


class LimitExceeded(PolyfleetError):
    """HTTP 429: the server cannot accept the request now. `retry_after_s` becomes the header Retry-After."""

    exit_code = FleetError.exit_code
    retry_after_s = 1


class TooManyJobs(LimitExceeded):
    retry_after_s = 30

    def __init__(self, waiting: int, maximum: int):
        super().__init__(
            f"{waiting:,} jobs are waiting; the maximum is {maximum:,}",
            f"wait until some have ended, or start the server with a larger {VARIABLE}",
        )
        self.args = (waiting, maximum)


class TooManyRequests(LimitExceeded):
    def __init__(self, maximum: int):
        super().__init__(f"the server is processing its maximum of {maximum} requests", "retry in 1 s")
        self.args = (maximum,)


def max_waiting_jobs(environment: Mapping[str, str] = os.environ) -> int:
    """Maximum number of waiting jobs. Raises UserError if the setting is not a number."""
    text = environment.get(VARIABLE, "") or str(MAX_WAITING_JOBS)
    if not text.isascii() or not text.isdigit():
        raise UserError(f"{VARIABLE}={text!r} is not a number of jobs", f"write a number, such as {MAX_WAITING_JOBS}")
    return int(text)
