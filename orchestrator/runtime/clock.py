"""Current time, as the core takes it: monotonic for durations, and seconds since 1970."""

import time

from orchestrator.core.controller.messages import Now


def now() -> Now:
    return Now(time.monotonic(), time.time())
