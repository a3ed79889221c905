"""Events of all jobs, as they happen."""

from typing import Annotated

from orchestrator.server.http.hub import Hub
from orchestrator.server.http.streams import follow_changes
from orchestrator.verbs.declare import Arg, Events, Role, verb
from orchestrator.views.jobs import ChangeEvents, ChangesPage

After = Annotated[int, Arg("number of the last event received: `last` or `seq`")]


@verb("GET /v1/changes", least=Role.VIEWER, waits=True)
async def wait(hub: Hub, after: After = 0, timeout_s: Annotated[float, Arg(max=30)] = 10.0) -> ChangesPage:
    """Long poll: responds as soon as there are events after number `after`, or with none after `timeout_s`. Continue
    with `last`; it may increase without an event, because events are removed with old jobs.
    """
    return await hub.streams.changes(after, timeout_s)


@verb("GET /v1/changes/stream", least=Role.VIEWER)
async def follow(hub: Hub, after: After = 0) -> Events[ChangeEvents]:
    """Stream the events of all jobs after number `after`, as they happen: server-sent events `change`."""
    return Events(follow_changes(hub.streams, after))
