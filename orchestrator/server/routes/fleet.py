"""The fleet: its pools, nodes and problems; take a node out of use and put it back."""

from fastapi import APIRouter, Response

from orchestrator.server.http.request_bodies import DrainBody
from orchestrator.server.http.response_views import returns
from orchestrator.server.http.responses import json_response
from orchestrator.server.routes import Service
from orchestrator.views.fleet import FindingView, FleetView, NodeStateView, NodeView
from orchestrator.views.server import HealthView

router = APIRouter(prefix="/v1", tags=["fleet"])


@router.get("/fleet")
@returns(FleetView)
def fleet(service: Service) -> Response:
    """The fleet by pools: kinds, nodes, devices, number of free devices, price."""
    return json_response(service.fleet())


@router.get("/nodes")
@returns(list[NodeView])
def nodes(service: Service) -> Response:
    """Every node with its facts, its devices and the jobs to which they are allocated."""
    return json_response(service.nodes())


@router.post("/nodes/{node}/drain")
@returns(NodeView | NodeStateView)
def drain(node: str, body: DrainBody, service: Service) -> Response:
    """Stop placing jobs on a node. With `now`, its attempts also save a checkpoint and move to other nodes."""
    return json_response(service.node_drain(node, body.now, body.reason))


@router.post("/nodes/{node}/resume")
@returns(NodeView | NodeStateView)
def resume(node: str, service: Service) -> Response:
    """Place jobs again on a node that was drained or that failed too often."""
    return json_response(service.node_resume(node))


@router.post("/nodes/{node}/remove")
@returns(NodeStateView)
def remove(node: str, service: Service) -> Response:
    """Remove a lost node that will not come back."""
    return json_response(service.node_remove(node))


@router.get("/doctor")
@returns(list[FindingView])
def doctor(service: Service) -> Response:
    """Findings: level (info, warning, error), subject, message, remedy, node."""
    return json_response(service.doctor())


@router.get("/health")
@returns(HealthView)
def health(service: Service) -> Response:
    """State of the server: age of the controller's last turn, waiting calls, silence of nodes, state of the store."""
    return json_response(service.health())
