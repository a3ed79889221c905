"""Named points where tests crash this process, e.g. POLYFLEET_CRASH_AT=event:placed:after."""

import os
import sys

AT = os.environ.get("POLYFLEET_CRASH_AT", "")
CODE = 137


def crash_line(name: str) -> str:
    """The last line that a process prints when it ends at a crash point."""
    return f"POLYFLEET_CRASH_AT: this process ends at {name}"


def point(name: str) -> None:
    """Exit as if by `kill -9` if POLYFLEET_CRASH_AT has this name (all: core/controller/crash_points.py)."""
    if name == AT:
        print(crash_line(name), file=sys.stderr, flush=True)  # noqa: T201 - tests wait for this line
        os._exit(CODE)
