"""What there is: the fleet, its nodes, what is wrong with them."""

from fastapi import APIRouter, Response

from orchestrator.server.answers import answer
from orchestrator.server.routes import Service

router = APIRouter(prefix="/v1", tags=["fleet"])


@router.get("/fleet")
def fleet(service: Service) -> Response:
    """The fleet by pools: kinds, nodes, devices, how many are free, price."""
    return answer(service.fleet())


@router.get("/nodes")
def nodes(service: Service) -> Response:
    """Every node with its facts, its devices and who leases them."""
    return answer(service.nodes())


@router.get("/doctor")
def doctor(service: Service) -> Response:
    """Findings: level (info, warning, error), subject, message, remedy, node."""
    return answer(service.doctor())


@router.get("/health")
def health(service: Service) -> Response:
    """The server itself: age of the controller's last turn, calls that wait, silence of nodes, state of the store."""
    return answer(service.health())
