"""What users ask of nodes. Pure."""

from dataclasses import replace

from cluster.errors import nearest
from orchestrator.core import attempt_stops
from orchestrator.core.commands import Refuse
from orchestrator.core.draft import Draft
from orchestrator.core.membership import wake
from orchestrator.core.messages import DrainAsked, RemoveAsked, ResumeAsked
from orchestrator.core.nodes import OWNER


def drain(draft: Draft, asked: DrainAsked) -> None:
    if asked.node not in draft.nodes:
        draft.command(Refuse(f"no node {asked.node!r}", nearest(asked.node, sorted(draft.nodes)), absent=True))
        return
    if draft.control.drained.get(asked.node) != asked.reason:
        draft.note(OWNER + asked.node, "drained", reason=asked.reason)
        draft.drained[asked.node] = asked.reason
        draft.change(changed=True)
    if asked.now:
        attempt_stops.save_all(
            draft, asked.node, f"node {asked.node} is drained{f': {asked.reason}' if asked.reason else ''}"
        )


def remove(draft: Draft, asked: RemoveAsked) -> None:
    """Of a node that is gone for good nothing is told any more; the name may come back, and take work then."""
    node = draft.nodes.get(asked.node)
    if node is None and asked.node not in draft.drained:
        draft.command(Refuse(f"no node {asked.node!r}", nearest(asked.node, sorted(draft.nodes)), absent=True))
        return
    if node is not None and not node.lost:
        remedy = "drain it and stop its Ray node first; `polyfleet hosts remove` does both for a host"
        draft.command(Refuse(f"node {asked.node} is still in the cluster", remedy))
        return
    if draft.on_node(asked.node):
        held = ", ".join(sorted(draft.on_node(asked.node)))
        draft.command(Refuse(f"node {asked.node} still has attempts of {held}", "wait until they were placed anew"))
        return
    if asked.node in draft.drained:
        draft.note(OWNER + asked.node, "undrained")
        draft.drained.pop(asked.node)
    draft.nodes.pop(asked.node)
    draft.change(changed=True)


def resume(draft: Draft, asked: ResumeAsked) -> None:
    node = draft.nodes.get(asked.node)
    if node is None and asked.node not in draft.drained:
        draft.command(Refuse(f"no node {asked.node!r}", nearest(asked.node, sorted(draft.nodes)), absent=True))
        return
    if asked.node in draft.drained:
        draft.note(OWNER + asked.node, "undrained")
        draft.drained.pop(asked.node)
    if node is not None:
        draft.nodes[asked.node] = replace(node, failures=(), quarantined_until_s=0.0)
        if node.resting:
            wake(draft, asked.node)
    draft.change(changed=True)
