"""Handle users' requests about nodes: drain, resume and remove. Pure."""

from dataclasses import replace

from cluster.errors import nearest
from orchestrator.core.attempt import attempt_stops
from orchestrator.core.controller.commands import Reject
from orchestrator.core.controller.draft import Draft
from orchestrator.core.controller.messages import DrainRequested, RemoveRequested, ResumeRequested
from orchestrator.core.controller.nodes import OWNER_PREFIX
from orchestrator.core.fleet.membership import wake


def drain(draft: Draft, message: DrainRequested) -> None:
    if message.node not in draft.nodes:
        draft.command(Reject(f"no node {message.node!r}", nearest(message.node, sorted(draft.nodes)), is_missing=True))
        return
    if draft.control.drained.get(message.node) != message.reason:
        draft.node_event(OWNER_PREFIX + message.node, "drained", reason=message.reason)
        draft.drained[message.node] = message.reason
        draft.change(needs_plan=True)
    if message.now:
        attempt_stops.preempt_node(
            draft, message.node, f"node {message.node} is drained{f': {message.reason}' if message.reason else ''}"
        )


def remove(draft: Draft, message: RemoveRequested) -> None:
    """Remove a node that will not return. A new node with its name may join later and take jobs."""
    node = draft.nodes.get(message.node)
    if node is None and message.node not in draft.drained:
        draft.command(Reject(f"no node {message.node!r}", nearest(message.node, sorted(draft.nodes)), is_missing=True))
        return
    if node is not None and not node.lost_reason:
        remedy = "drain it and stop its Ray node first; `polyfleet hosts remove` does both for a host"
        draft.command(Reject(f"node {message.node} is still in the cluster", remedy))
        return
    if draft.on_node(message.node):
        jobs = ", ".join(sorted(draft.on_node(message.node)))
        draft.command(
            Reject(f"node {message.node} still has attempts of {jobs}", "wait until they have been placed again")
        )
        return
    if message.node in draft.drained:
        draft.node_event(OWNER_PREFIX + message.node, "undrained")
        draft.drained.pop(message.node)
    draft.nodes.pop(message.node)
    draft.change(needs_plan=True)


def resume(draft: Draft, message: ResumeRequested) -> None:
    node = draft.nodes.get(message.node)
    if node is None and message.node not in draft.drained:
        draft.command(Reject(f"no node {message.node!r}", nearest(message.node, sorted(draft.nodes)), is_missing=True))
        return
    if message.node in draft.drained:
        draft.node_event(OWNER_PREFIX + message.node, "undrained")
        draft.drained.pop(message.node)
    if node is not None:
        draft.nodes[message.node] = replace(node, failures=(), quarantined_until_s=0.0)
        if node.resting:
            wake(draft, message.node)
    draft.change(needs_plan=True)
