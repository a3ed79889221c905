"""Request bodies, with limits on depth and number of values: a body within the byte limit may still exceed these."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

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
        if any(isinstance(value, float) and not math.isfinite(value) for value in level):
            raise ValueError("NaN and Infinity are not valid in JSON")
        if any(isinstance(value, int) and abs(value) > MAX_INTEGER for value in level):
            raise ValueError("an integer exceeds 64 bits")
        level = [inner for value in level for inner in _inner_values(value)]
    return data


def _inner_values(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


Spec = Annotated[dict[str, Any], AfterValidator(check_depth), Field(description="a job spec; `GET /v1/schema/job`")]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BulkJob(Body):
    """A job of a bulk submission."""

    spec: Spec
    code_archive: str = Field(
        default="", pattern="^([0-9a-f]{64})?$", description="SHA-256 of an uploaded code archive, or empty"
    )


class CopyBody(Body):
    source: str = Field(description="POOL:PATH, or the URI of an object store")
    target: str = Field(description="POOL:FOLDER, or the URI of an object store")
    to_kind: str = Field(default="", description="convert for this kind of device (default: copy bit by bit)")
    convert_at: Literal["source", "target"] = Field(default="source", description="the pool whose node converts")
    on_lossy: Literal["error", "allow"] = Field(
        default="error", description="action if a conversion would change values"
    )


class ToolBody(Body):
    arguments: Spec = Field(description="arguments by name: POOL:PATH for locations, and the tool's options")


class FilePut(Body):
    uploaded: str = Field(min_length=1, max_length=1100, description="path in the upload")
    path: str = Field(min_length=1, max_length=1100, description="path in the job's folder")


class FilesPut(Body):
    upload: str = Field(pattern="^[0-9a-z-]{8,64}$")
    files: list[FilePut] = Field(min_length=1, max_length=1000)
    attempt: int = Field(ge=0, le=MAX_INTEGER, description="from `files/place`, like `node` and `pool`")
    node: str = Field(max_length=255)
    pool: str = Field(max_length=255)
    force: bool = Field(default=False, description="overwrite files that differ; never while the job runs")


class DataSent(Body):
    upload: str = Field(pattern="^[0-9a-z-]{8,64}$")
    single: str = Field(default="", max_length=1100, description="path of the only file in the upload, or empty")


class Arrived(Body):
    node: str = Field(max_length=255)
    folder: str = Field(min_length=1, max_length=1100, description="folder in the pool's storage")
    name: str = Field(pattern="^step-[0-9]{8,}-[0-9a-f]{8}$", max_length=64)
