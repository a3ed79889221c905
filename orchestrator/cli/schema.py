"""`polyfleet schema job|fleet`."""

from enum import StrEnum
from typing import Annotated

import typer

from orchestrator.cli.terminal.output import Format, as_json, as_yaml, write


class Kind(StrEnum):
    JOB = "job"
    FLEET = "fleet"


class SchemaFormat(StrEnum):
    JSON = "json"
    YAML = "yaml"


def schema(
    kind: Annotated[Kind, typer.Argument(help="Schema to print: `job` or `fleet`")],
    output: Annotated[SchemaFormat, typer.Option("--output", "-o", help="Output format")] = SchemaFormat.JSON,
) -> None:
    """Print the JSON Schema of a job file or of a fleet file."""
    from orchestrator.spec.job_spec import get_schema

    data = get_schema(kind.value)
    write(as_json(data) if output.value == Format.JSON.value else as_yaml(data))
