"""Where a controller may be stopped dead: before and after each event is stored and each command is carried out. Every
such point has a name, for tests that stop it there. Pure: runtime/ calls what a test has put in its place.
"""

from typing import get_args

from orchestrator.core.commands import Command
from orchestrator.core.fold import NOTES
from orchestrator.core.nodes import EVENTS as OF_NODES
from orchestrator.core.states import EVENTS

BEFORE, AFTER = "before", "after"


def of_event(event: str, side: str) -> str:
    """`event:placed:before`: before its transaction is committed; `after`: once it is, and before its commands."""
    return f"event:{event}:{side}"


def of_command(command: Command | type, side: str) -> str:
    """`command:Launch:after`: it was carried out, or given to a thread that does."""
    kind = command if isinstance(command, type) else type(command)
    return f"command:{kind.__name__}:{side}"


def events() -> tuple[str, ...]:
    """Names of all events that the controller or its users write."""
    return tuple(dict.fromkeys(("submitted", *EVENTS, *sorted(NOTES), *OF_NODES)))


def names() -> tuple[str, ...]:
    """All points, in a fixed order."""
    sides = (BEFORE, AFTER)
    told = [of_event(event, side) for event in events() for side in sides]
    return tuple(told + [of_command(kind, side) for kind in get_args(Command) for side in sides])
