"""Request bodies, with limits on depth and number of values: a body within the byte limit may still exceed these."""

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MAX_DEPTH = 32
MAX_VALUES = 20_000
MAX_INTEGER = 2**63 - 1
"""Largest integer of a parameter: that of databases."""


def check_depth(data: dict[str, Any]) -> dict[str, Any]:
    """Return `data`. Raises ValueError if it is nested deeper than MAX_DEPTH, has more than MAX_VALUES values, or
    contains NaN, Infinity or an integer beyond 64 bits.
    """
    level: list[Any] = [data]
    value_count = depth = 0
    while level:
        depth, value_count = depth + 1, value_count + len(level)
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        if value_count > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES:,} values")
        level = _inner_values(level)
    return data


def _inner_values(level: list[Any]) -> list[Any]:
    """The values in the objects and lists of `level`. Raises ValueError for a number that is not valid."""
    inner: list[Any] = []
    for value in level:
        if isinstance(value, str):  # most values
            continue
        if isinstance(value, dict):
            inner += value.values()
        elif isinstance(value, list):
            inner += value
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError("NaN and Infinity are not valid in JSON")
        elif isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise ValueError("an integer exceeds 64 bits")
    return inner


Spec = Annotated[dict[str, Any], AfterValidator(check_depth), Field(description="a job spec; `GET /v1/schema/job`")]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BulkJob(Body):
    """A job of a bulk submission."""

    spec: Spec
    code_archive: str = Field(
        default="", pattern="^([0-9a-f]{64})?$", description="SHA-256 of an uploaded code archive, or empty"
    )


class FilePut(Body):
    """A file of an upload, and where to put it."""

    uploaded: str = Field(min_length=1, max_length=1100, description="path in the upload")
    path: str = Field(min_length=1, max_length=1100, description="path in the job's folder")
