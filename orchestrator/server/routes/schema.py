"""JSON Schemas of job specs and fleet files."""

from typing import Literal

from fastapi import APIRouter, Response

from orchestrator.server.http.responses import json_response

router = APIRouter(prefix="/v1/schema", tags=["schema"])


@router.get("/{kind}")
def schema(kind: Literal["job", "fleet"]) -> Response:
    """The JSON Schema of a job spec or of a fleet file."""
    from orchestrator.spec.schemas import get_schema

    return json_response(get_schema(kind))
