"""JSON Schemas of job specs and fleet files."""

from typing import Literal

from fastapi import APIRouter, Response

from orchestrator.server.http.response_views import returns
from orchestrator.server.http.responses import json_response
from orchestrator.views.values import JsonObject

router = APIRouter(prefix="/v1/schema", tags=["schema"])


@router.get("/{kind}")
@returns(JsonObject)
def schema(kind: Literal["job", "fleet"]) -> Response:
    """The JSON Schema of a job spec or of a fleet file."""
    from orchestrator.spec.schemas import get_schema

    return json_response(get_schema(kind))
