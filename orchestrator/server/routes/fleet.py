"""What there is: the fleet, its nodes, what is wrong with them; taking a node out of use and back."""

from fastapi import APIRouter, Response

from orchestrator.server.responses import json_response
from orchestrator.server.routes import Service
from orchestrator.server.routes.request_bodies import DrainBody

router = APIRouter(prefix="/v1", tags=["fleet"])


@router.get("/fleet")
def fleet(service: Service) -> Response:
    """The fleet by pools: kinds, nodes, devices, how many are free, price."""
    return json_response(service.fleet())


@router.get("/nodes")
def nodes(service: Service) -> Response:
    """Every node with its facts, its devices and who leases them."""
    return json_response(service.nodes())


@router.post("/nodes/{node}/drain")
def drain(node: str, body: DrainBody, service: Service) -> Response:
    """Place nothing on a node any more; with `now` its attempts save and move as well."""
    return json_response(service.node_drain(node, body.now, body.reason))


@router.post("/nodes/{node}/resume")
def resume(node: str, service: Service) -> Response:
    """Place jobs on it again: one that was drained, or that failed too often."""
    return json_response(service.node_resume(node))


@router.post("/nodes/{node}/remove")
def remove(node: str, service: Service) -> Response:
    """Forget a node that is lost and will not come back."""
    return json_response(service.node_remove(node))


@router.get("/doctor")
def doctor(service: Service) -> Response:
    """Findings: level (info, warning, error), subject, message, remedy, node."""
    return json_response(service.doctor())


@router.get("/health")
def health(service: Service) -> Response:
    """The server itself: age of the controller's last turn, calls that wait, silence of nodes, state of the store."""
    return json_response(service.health())
