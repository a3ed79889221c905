"""Named points where a test may end this process, as `kill -9` would: POLYFLEET_CRASH_AT=event:placed:after."""

import os
import sys

AT = os.environ.get("POLYFLEET_CRASH_AT", "")
CODE = 137


def told(name: str) -> str:
    """The last line of a process that ended there."""
    return f"POLYFLEET_CRASH_AT: this process ends at {name}"


def point(name: str) -> None:
    """core/crash_points.py has all names. Nothing happens unless the variable named this one at the start."""
    if name == AT:
        print(told(name), file=sys.stderr, flush=True)  # noqa: T201 - so that a test knows that it came here
        os._exit(CODE)
