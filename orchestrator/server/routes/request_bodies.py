"""Request bodies, with limits on their shape: one within its byte limit may still be too deep or wide to handle."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from orchestrator.limits import MOST_BULK

MAX_DEPTH = 32
MAX_VALUES = 20_000
LONGEST_COMMAND_BYTES = 32 << 10
LARGEST = 2**63 - 1
"""The largest whole number a parameter may have: what databases hold."""


def check_depth(data: dict[str, Any]) -> dict[str, Any]:
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


Spec = Annotated[dict[str, Any], AfterValidator(check_depth), Field(description="a job spec; `GET /v1/schema/job`")]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SubmitBody(Body):
    spec: Spec
    package: str = Field(
        default="", pattern="^([0-9a-f]{64})?$", description="SHA-256 of an uploaded package, or nothing"
    )


class NewJob(Body):
    """A job to plan for, which is not submitted."""

    spec: Spec
    content_sha: str = Field(
        default="", pattern="^([0-9a-f]{64})?$", description="SHA-256 of the folder's content, or nothing"
    )


class BulkSubmitBody(Body):
    jobs: list[SubmitBody] = Field(min_length=1, max_length=MOST_BULK, description="each as for `POST /v1/jobs`")


class MigrateBody(Body):
    to: str = Field(min_length=1, max_length=200, description="a pool, a kind such as `tpu:v5e`, or a back end")


def _arguments(words: list[str]) -> list[str]:
    """Raises ValueError."""
    if any("\0" in word for word in words):
        raise ValueError("a word has a NUL byte")
    if words and not words[0]:
        raise ValueError("the program's name is empty")
    if sum(len(word.encode()) + 1 for word in words) > LONGEST_COMMAND_BYTES:
        raise ValueError(f"longer than {LONGEST_COMMAND_BYTES} bytes")
    return words


Rows = Annotated[int, Field(ge=1, le=10_000)]


class Size(Body):
    rows: Rows = 24
    columns: Rows = 80


class Command(Size):
    command: Annotated[list[str], AfterValidator(_arguments)] = Field(
        max_length=4096, description="a program and its arguments, at most 32 KiB; nothing: a shell"
    )
    rank: int = Field(default=0, ge=0, le=LARGEST, description="beside which rank")
    terminal: bool = Field(default=False, description="give it a terminal of `rows` and `columns`")
    input: bool = Field(default=False, description="its standard input comes by `/input`; else it has none")
    term: str = Field(default="", pattern="^[A-Za-z0-9._+-]{0,64}$", description="TERM of that terminal")
    by: str = Field(default="", max_length=200, description="who asks, for the server's log; not checked")


class Input(Body):
    data: str = Field(max_length=900_000, description="base64")
    offset: int = Field(ge=0, le=LARGEST, description="how many bytes of input come before; what was taken is skipped")
    end: bool = Field(default=False, description="no more comes")


class DrainBody(Body):
    now: bool = Field(default=False, description="its attempts save and move at once; else they may end there")
    reason: str = Field(default="", max_length=500)


class BenchmarkBody(Body):
    request: Spec = Field(description="what to measure: cases, precisions, levels, pools, kinds, rounds, …")
    package: str = Field(
        default="", pattern="^([0-9a-f]{64})?$", description="SHA-256 of an uploaded package, or nothing"
    )


class CopyBody(Body):
    source: str = Field(description="POOL:PATH, or the URI of an object store")
    target: str = Field(description="POOL:FOLDER, or the URI of an object store")
    to_kind: str = Field(
        default="", description="convert what does not suit this kind; by default bits stay as they are"
    )
    convert_at: Literal["source", "target"] = Field(default="source", description="on a node of which pool")
    on_lossy: Literal["error", "allow"] = Field(default="error", description="where a conversion would change values")


class ToolBody(Body):
    arguments: Spec = Field(description="by name: POOL:PATH for places, and the tool's options")


class FilePut(Body):
    uploaded: str = Field(min_length=1, max_length=1100, description="its path in the upload")
    path: str = Field(min_length=1, max_length=1100, description="its path in the job's folder")


class FilesPut(Body):
    upload: str = Field(pattern="^[0-9a-z-]{8,64}$")
    files: list[FilePut] = Field(min_length=1, max_length=1000)
    epoch: int = Field(ge=0, le=LARGEST, description="as `files/place` tells, and so node and pool")
    node: str = Field(max_length=255)
    pool: str = Field(max_length=255)
    force: bool = Field(default=False, description="write over files that differ; never while the job runs")


class DataSent(Body):
    upload: str = Field(pattern="^[0-9a-z-]{8,64}$")
    single: str = Field(default="", max_length=1100, description="the only file's path in the upload, or nothing")


class Arrived(Body):
    node: str = Field(max_length=255)
    folder: str = Field(min_length=1, max_length=1100, description="in the pool's storage")
    name: str = Field(pattern="^step-[0-9]{8,}-[0-9a-f]{8}$", max_length=64)
