"""Request bodies, with limits on their shape: one within its byte limit may still be too deep or wide to handle."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from orchestrator.limits import MOST_BULK

MAX_DEPTH = 32
MAX_VALUES = 20_000
LARGEST = 2**63 - 1
"""The largest whole number a parameter may have: what databases hold."""


def bounded(data: dict[str, Any]) -> dict[str, Any]:
    """`data` itself. Raises ValueError: deeper than 32, over 20,000 values, a number JSON has not, or one beyond 64
    bits.
    """
    level: list[Any] = [data]
    seen = depth = 0
    while level:
        depth, seen = depth + 1, seen + len(level)
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        if seen > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES:,} values")
        if any(isinstance(value, float) and not math.isfinite(value) for value in level):
            raise ValueError("NaN and Infinity are not JSON")
        if any(isinstance(value, int) and abs(value) > LARGEST for value in level):
            raise ValueError("a whole number is beyond 64 bits")
        level = [inner for value in level for inner in _inside(value)]
    return data


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


Spec = Annotated[dict[str, Any], AfterValidator(bounded), Field(description="a job spec; `GET /v1/schema/job`")]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Submission(Body):
    spec: Spec
    package: str = Field(
        default="", pattern="^([0-9a-f]{64})?$", description="SHA-256 of an uploaded package, or nothing"
    )


class Submissions(Body):
    jobs: list[Submission] = Field(min_length=1, max_length=MOST_BULK, description="each as for `POST /v1/jobs`")


class Migration(Body):
    to: str = Field(min_length=1, max_length=200, description="a pool, a kind such as `tpu:v5e`, or a back end")


class Drain(Body):
    now: bool = Field(default=False, description="its attempts save and move at once; else they may end there")
    reason: str = Field(default="", max_length=500)


class BenchmarkOrder(Body):
    request: Spec = Field(description="what to measure: cases, precisions, levels, pools, kinds, rounds, …")
    package: str = Field(
        default="", pattern="^([0-9a-f]{64})?$", description="SHA-256 of an uploaded package, or nothing"
    )


class Question(Body):
    spec: Spec


class CopyOrder(Body):
    source: str = Field(description="POOL:PATH, or the URI of an object store")
    target: str = Field(description="POOL:FOLDER, or the URI of an object store")
    to_kind: str = Field(
        default="", description="convert what does not suit this kind; by default bits stay as they are"
    )
    convert_at: Literal["source", "target"] = Field(default="source", description="on a node of which pool")
    on_lossy: Literal["error", "allow"] = Field(default="error", description="where a conversion would change values")


class ToolOrder(Body):
    arguments: Spec = Field(description="by name: POOL:PATH for places, and the tool's options")
