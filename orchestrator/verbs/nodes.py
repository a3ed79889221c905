"""Nodes: list them, take one out of use and put it back."""

from typing import Annotated

from orchestrator.core.controller.messages import DrainRequested, RemoveRequested, ResumeRequested
from orchestrator.core.controller.nodes import allocations
from orchestrator.runtime.clock import now as time_now
from orchestrator.server.http.hub import Hub
from orchestrator.services.service import Service
from orchestrator.services.views import absent_node_view, node_view
from orchestrator.verbs.declare import Arg, Role, verb
from orchestrator.views.fleet import NodeView

Node = Annotated[str, Arg("name of a node")]
Now = Annotated[bool, Arg("its attempts save and move at once (default: they may end on the node)")]
Reason = Annotated[str, Arg("why; the node's `closed` contains it", max_length=500)]


@verb("GET /v1/nodes", least=Role.VIEWER)
def list_(hub: Hub) -> list[NodeView]:
    """Every node with its facts, its devices and the jobs to which they are allocated."""
    return _views(hub.service)


@verb("POST /v1/nodes/{node}/drain", least=Role.ADMIN)
def drain(hub: Hub, node: Node, now: Now = False, reason: Reason = "") -> NodeView:
    """Stop placing jobs on a node. With `now`, its attempts also save a checkpoint and move to other nodes."""
    return _after(hub.service, DrainRequested(node, reason, now))


@verb("POST /v1/nodes/{node}/resume", least=Role.ADMIN)
def resume(hub: Hub, node: Node) -> NodeView:
    """Place jobs again on a node that was drained or that failed too often."""
    return _after(hub.service, ResumeRequested(node))


@verb("POST /v1/nodes/{node}/remove", least=Role.ADMIN)
def remove(hub: Hub, node: Node) -> NodeView:
    """Remove a lost node that will not come back."""
    hub.service.readiness.check_served()
    hub.service.runtime.post_and_wait(RemoveRequested(node))
    return absent_node_view(node, "removed")


def _views(service: Service) -> list[NodeView]:
    """All nodes. Raises FleetError if no fleet is running."""
    service.readiness.wait_until_ready()
    if not service.agents.items():
        service.readiness.check_served()
    state, at = service.runtime.control, time_now()
    allocated = allocations(state.records.values())
    return [node_view(node, state, at.s, allocated) for _, node in sorted(state.nodes.items())]


def _after(service: Service, request: DrainRequested | ResumeRequested) -> NodeView:
    """Pass a request about a node to the controller; return the node afterwards."""
    service.readiness.check_served()
    service.runtime.post_and_wait(request)
    views = (view for view in _views(service) if view["node"] == request.node)
    return next(views, None) or absent_node_view(request.node, "unknown")
