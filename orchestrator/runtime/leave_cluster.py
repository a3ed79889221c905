"""A cluster that is not ours gets back what we hold there; attempts save, and stop by themselves."""

import logging
import queue
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from orchestrator.core.attempts import Live
from orchestrator.runtime import autoscaler, reservations
from orchestrator.runtime.actors import first_line
from orchestrator.runtime.agents import Agents
from orchestrator.runtime.ray_calls import RAY

log = logging.getLogger(__name__)

STOPS_S = 5.0
"""So long a cluster that is left waits for its nodes to have heard that their attempts are to stop."""


def give_back(agents: Agents, lives: Iterable[Live], grows: bool = False) -> None:
    """It waits for Ray. `grows`: its autoscaler has nodes for us."""
    if grows:
        _need_no_nodes()
    heard: queue.SimpleQueue[None] = queue.SimpleQueue()

    def done(node: str, error: BaseException | None) -> None:
        if error is not None:
            log.warning("node %s was not asked to stop: %s", node, error)
        heard.put(None)

    asked = [(live, node) for live in lives for node in {part.node for part in live.parts}]
    for live, node in asked:
        agents.tell(node, "stop", live.job, live.epoch, "preempt", done=partial(done, node))
    until_s = time.monotonic() + STOPS_S
    with suppress(queue.Empty):  # a stop that an agent has not begun is lost with it
        for _ in asked:
            heard.get(timeout=max(0.0, until_s - time.monotonic()))
    agents.dismiss()
    for place in reservations.held():
        reservations.release(place)


def _need_no_nodes() -> None:
    try:
        RAY.run("ask its autoscaler for nodes", lambda: autoscaler.ask(()), autoscaler.LIMIT_S)
    except Exception as e:
        log.warning("Ray's autoscaler was not told that its nodes are needed no more: %s", first_line(e))
