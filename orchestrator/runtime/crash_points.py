"""Named points where tests crash this process, e.g. POLYFLEET_CRASH_AT=event:placed:after.

They are before and after each stored event and each command.
"""

import os
import sys
from typing import get_args

from orchestrator.core.controller.commands import Command
from orchestrator.core.controller.nodes import EVENTS as OF_NODES
from orchestrator.core.jobs.fold import NOTES
from orchestrator.core.states import EVENTS

AT = os.environ.get("POLYFLEET_CRASH_AT", "")
CODE = 137
BEFORE, AFTER = "before", "after"


def crash_line(name: str) -> str:
    """The last line that a process prints when it ends at a crash point."""
    return f"POLYFLEET_CRASH_AT: this process ends at {name}"


def point(name: str) -> None:
    """Exit as if by `kill -9` if POLYFLEET_CRASH_AT has this name."""
    if name == AT:
        print(crash_line(name), file=sys.stderr, flush=True)  # noqa: T201 - tests wait for this line
        os._exit(CODE)


def event_point(event: str, side: str) -> str:
    """Return e.g. `event:placed:before`: before the commit of its transaction; `after`: between commit and commands."""
    return f"event:{event}:{side}"


def command_point(command: Command | type, side: str) -> str:
    """Return e.g. `command:Launch:after`: the command was executed, or handed to a thread that executes it."""
    kind = command if isinstance(command, type) else type(command)
    return f"command:{kind.__name__}:{side}"


def events() -> tuple[str, ...]:
    """Return the names of all events that the controller or its users write."""
    return tuple(dict.fromkeys(("submitted", *EVENTS, *sorted(NOTES), *OF_NODES)))


def names() -> tuple[str, ...]:
    """Return the names of all points in a fixed order."""
    sides = (BEFORE, AFTER)
    points = [event_point(event, side) for event in events() for side in sides]
    return tuple(points + [command_point(kind, side) for kind in get_args(Command) for side in sides])
