"""Names of the points where tests kill a controller: before and after each stored event and each command.

Pure: runtime/ calls the hook that a test has installed.
"""

from typing import get_args

from orchestrator.core.controller.commands import Command
from orchestrator.core.controller.nodes import EVENTS as OF_NODES
from orchestrator.core.jobs.fold import NOTES
from orchestrator.core.states import EVENTS

BEFORE, AFTER = "before", "after"


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
