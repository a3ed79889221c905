"""JSON Schemas of job specs and fleet files, by the name that the CLI and REST use."""

from typing import Any

from cluster.errors import UserError, nearest

KINDS = ("job", "fleet")


def get_schema(kind: str) -> dict[str, Any]:
    """The schema of a job spec or of a fleet file. Raises UserError for another kind."""
    if kind == "job":
        from orchestrator.spec.job_spec import job_schema

        return job_schema()
    if kind == "fleet":
        from cluster.fleet.fleet_spec import fleet_schema

        return fleet_schema()
    raise UserError(f"no schema {kind!r}", nearest(kind, KINDS))
