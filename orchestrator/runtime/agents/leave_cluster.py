"""Leave a cluster that others run: let attempts save and stop, end agents, release reservations."""

import logging
import queue
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from orchestrator.core.controller.attempts import LiveAttempt
from orchestrator.runtime.agents import autoscaler, reservations
from orchestrator.runtime.agents.actors import first_line
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.agents.ray_calls import RAY

log = logging.getLogger(__name__)

STOP_REQUESTS_S = 5.0
"""Seconds to wait until all nodes have received the request to stop their attempts."""


def leave_cluster(agents: Agents, attempts: Iterable[LiveAttempt], grows: bool = False) -> None:
    """Give back everything that we hold in the cluster.

    Waits for Ray. `grows`: its autoscaler has nodes for us.
    """
    if grows:
        _release_autoscaled_nodes()
    replies: queue.SimpleQueue[None] = queue.SimpleQueue()

    def done(node: str, error: BaseException | None) -> None:
        if error is not None:
            log.warning("the request to node %s to stop its attempts failed: %s", node, error)
        replies.put(None)

    stops = [(live, node) for live in attempts for node in {part.node for part in live.parts}]
    for live, node in stops:
        agents.call_async(node, "stop", live.job, live.epoch, "preempt", done=partial(done, node))
    until_s = time.monotonic() + STOP_REQUESTS_S
    with suppress(queue.Empty):  # ending an agent loses a stop that it has not started
        for _ in stops:
            replies.get(timeout=max(0.0, until_s - time.monotonic()))
    agents.stop_all()
    for allocation_name in reservations.list_reserved():
        reservations.release(allocation_name)


def _release_autoscaled_nodes() -> None:
    try:
        RAY.call("request nodes from its autoscaler", lambda: autoscaler.request_nodes(()), autoscaler.LIMIT_S)
    except Exception as e:
        log.warning("the request to release the nodes of Ray's autoscaler failed: %s", first_line(e))
