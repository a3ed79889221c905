"""JSON Schemas of job specs and fleet files."""

from typing import Literal

from orchestrator.server.http.hub import Hub
from orchestrator.verbs.declare import Role, verb
from orchestrator.views.values import JsonObject


@verb("GET /v1/schema/{kind}", least=Role.VIEWER)
def show(hub: Hub, kind: Literal["job", "fleet"]) -> JsonObject:
    """The JSON Schema of a job spec or of a fleet file."""
    from orchestrator.spec.job_spec import get_schema

    return get_schema(kind)
