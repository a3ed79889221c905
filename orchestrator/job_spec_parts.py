"""The parts of a job's spec below its top level: devices and candidates, recovery, checkpoints."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    StrictBool,
    StrictInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from cluster.validation_errors import WrongValueError, prefix_field
from orchestrator import job_spec_fields as f
from orchestrator import resource_syntax as written
from orchestrator.core.model import Declared, Recovery
from orchestrator.core.timing import MIN_LEASE_S
from orchestrator.job_spec_memory import Memory, MemorySpec, Model
from orchestrator.resource_syntax import DeviceRequest, counted, duration_s, hang_after_s


class ResourceShape(Model):
    """Which devices, and how many."""

    accelerators: f.Accelerators = None
    """`nvidia:H100:8`, `tpu:v5e:4`, `cpu:1`, `any`; a range `nvidia:H100:2..8`; a list (in that order); a mapping
    {H100: 8, A100: 8} (any of them). `gpus` is the same."""

    count: f.Number = None
    """Devices per node, where `accelerators` does not say: 8, 2..8 or 8+."""

    nodes: f.Count | None = None
    """Nodes of one island (same back end, environment and kind), 1 unless said."""

    memory: Memory | None = None
    """Least memory of each device, e.g. 40GB; or a model from whose numbers that is estimated, as in
    {model: config.json, seq: 2048}."""

    max_price: f.Price | None = None
    """Highest price of one device per hour, as `price_per_hour` of pools; a pool without a price costs nothing."""

    pool: str = ""
    """Only nodes of this pool."""

    pools: f.PoolNames = ()
    """Only nodes of these pools."""

    exclude_pools: f.PoolNames = ()
    """No nodes of these pools."""

    dtypes: f.Dtypes = ()
    """Only devices that compute with these natively by their documents, e.g. [bf16] or [float8_e4m3fn]."""

    features: f.Features = ()
    """Only devices that offer these by their documents, e.g. [flash_attention] or [collectives=nccl]."""

    node: str = ""
    """Only this node, as `polyfleet inventory` names it."""

    exclusive: StrictBool | None = None
    """All devices of the kind on each node, once no other job holds one of them; takes the place of a number."""

    @model_validator(mode="before")
    @classmethod
    def _gpus_is_accelerators(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "gpus" not in data:
            return data
        if "accelerators" in data:
            raise WrongValueError("gpus and accelerators are the same key", "keep one of them")
        return {("accelerators" if key == "gpus" else key): value for key, value in data.items()}

    @model_validator(mode="after")
    def _pool_once(self) -> "ResourceShape":
        if self.pool and self.pools:
            raise WrongValueError("has both pool and pools", "keep one of them")
        return self

    @field_validator("count")
    @classmethod
    def _count_once(cls, count: Any, info: ValidationInfo) -> Any:
        asked = info.data.get("accelerators")
        if count is not None and asked is not None:
            for wanted in written.accelerators(asked):
                prefix_field(counted, wanted, count)
        return count


class CandidateSpec(ResourceShape):
    """One acceptable way to run the job; what it leaves out is as the job says."""

    precision: f.Precision = ""
    batch_size: f.BatchSize = 0
    env: f.Variables = Field(default_factory=dict)
    command: f.Command = ""
    launch: f.Launch = ""
    arguments: dict[str, Any] = Field(default_factory=dict)


def _read(shape: ResourceShape, beside: Path) -> dict[str, Any]:
    return {"memory": shape.memory.read(beside)} if isinstance(shape.memory, MemorySpec) else {}


class ResourceSpec(ResourceShape):
    """One shape, or candidates that take from it what they leave out."""

    any_of: Annotated[tuple[CandidateSpec, ...], Field(max_length=32)] = ()
    """Any of these, the best that is free."""

    ordered: Annotated[tuple[CandidateSpec, ...], Field(max_length=32)] = ()
    """The first of these that is free."""

    @model_validator(mode="after")
    def _one_list(self) -> "ResourceSpec":
        if self.any_of and self.ordered:
            raise WrongValueError("has both any_of and ordered", "keep one of them")
        return self

    @model_validator(mode="after")
    def _whole_or_counted(self) -> "ResourceSpec":
        if not any(one.exclusive for one in (self, *self.any_of, *self.ordered)):
            return self
        for own, wanted in self.alternatives():
            if self.is_exclusive(own) and wanted.counted:
                told = f"exclusive takes all {','.join(wanted.kinds)} devices of a node, and a number is given as well"
                raise WrongValueError(told, "keep one of them")
        return self

    def is_exclusive(self, own: CandidateSpec) -> bool:
        return bool(self.exclusive if own.exclusive is None else own.exclusive)

    def read(self, beside: Path) -> "ResourceSpec":
        """With the numbers of models that are named by the files they are in."""
        return self.model_copy(
            update={
                "any_of": tuple(one.model_copy(update=_read(one, beside)) for one in self.any_of),
                "ordered": tuple(one.model_copy(update=_read(one, beside)) for one in self.ordered),
                **_read(self, beside),
            }
        )

    @property
    def in_order(self) -> bool:
        return bool(self.ordered) or (not self.any_of and isinstance(self.accelerators, list | tuple))

    def alternatives(self) -> Iterator[tuple[CandidateSpec, DeviceRequest]]:
        """Every candidate with the devices it wants: a list or mapping of accelerators makes several of one."""
        for candidate in self.ordered or self.any_of or (_PLAIN,):
            for wanted in _wanted(candidate, self):
                yield candidate, wanted


Failing = Literal[
    "user", "oom", "signal", "start", "internal", "unreadable", "launch", "lost", "storage", "nan", "hang"
]
"""Kinds of failure, as workers.messages.FAILURES has them."""
Reaction = Literal["restart", "retry", "next", "fail", "ignore"]


class RecoverySpec(Model):
    """What may be tried again. Failures of the job's code are restarts, lost nodes and preemptions interruptions."""

    max_restarts: Annotated[StrictInt, Field(ge=-1)] = 0
    """-1: no limit."""

    max_interruptions: Annotated[StrictInt, Field(ge=-1)] = -1
    retry_exit_codes: tuple[Annotated[StrictInt, Field(ge=1, le=255)], ...] = ()
    """Exit codes that count as interruptions, not as restarts."""

    backoff: f.Duration = "1s"
    """First pause; it doubles up to 60 s."""

    lease: f.Duration = "10s"
    """How long an attempt runs on without hearing from the server or the cluster's head; at least 5 s. It has no effect
    beside `on_disconnect: wait`."""

    grace: f.Duration = "30s"
    """Time to save a checkpoint when asked to stop."""

    on_events: dict[Failing, Reaction] = Field(default_factory=dict)
    """What follows a kind of failure, e.g. {oom: next, hang: retry}: `restart` counts against max_restarts, `retry` as
    an interruption, `next` is a restart that goes on with the next candidate, `fail` ends the job. {nan: ignore} lets a
    training go on whose loss is no number."""

    cross_vendor: StrictBool = True
    """Whether a restart may use a candidate of another back end than the one the job last ran on."""

    on_disconnect: Literal["restart", "wait", "stop"] = "restart"
    """When the node of an attempt cannot be reached: restart elsewhere once its lease has ended, wait for the node, or
    stop the job."""

    hang_after: f.HangAfter = ""
    """How long ranks may make no progress, e.g. 10m, or `never`. Left out: twice their 99th percentile step, at least
    60 s, for `train`; no limit for other tasks."""

    @field_validator("on_events")
    @classmethod
    def _only_nan_is_ignored(cls, on_events: dict[str, str]) -> dict[str, str]:
        for kind, reaction in on_events.items():
            if reaction == "ignore" and kind != "nan":
                remedy = "write `hang_after: never`" if kind == "hang" else "write restart, retry, next or fail"
                raise WrongValueError(f"{kind} cannot be ignored", remedy)
        return on_events

    @field_validator("lease")
    @classmethod
    def _long_enough(cls, lease: Any) -> Any:
        if duration_s(lease) < MIN_LEASE_S:
            why = "a node cannot renew a shorter one in time while the server is silent"
            raise WrongValueError(f"{lease} is too short", f"write at least {MIN_LEASE_S:.0f}s: {why}")
        return lease

    @cached_property
    def parsed(self) -> Recovery:
        """As the core has it. Most jobs share the one that says nothing."""
        return Recovery(
            self.max_restarts,
            self.max_interruptions,
            tuple(self.retry_exit_codes),
            backoff_s=duration_s(self.backoff),
            lease_s=duration_s(self.lease),
            grace_s=duration_s(self.grace),
            on_events={str(kind): str(reaction) for kind, reaction in self.on_events.items()},
            cross_vendor=self.cross_vendor,
            on_disconnect=self.on_disconnect,
            hang_after_s=hang_after_s(self.hang_after),
        )


class CheckpointSpec(Model):
    keep: Annotated[StrictInt, Field(ge=1, le=1000)] = 3
    """How many of the newest checkpoints stay."""

    resume_from: f.ResumeFrom = ""
    """Start from this checkpoint: POOL:PATH, or PATH in the pool the job runs in."""

    path: f.ScriptPath = ""
    """Of a `run` job: the file or folder in `$POLYFLEET_OUTPUT_DIR` that its script saves and resumes from, such as
    ckpt.pt. `keep` and `resume_from` are of `train` jobs."""

    format: f.ScriptFormat = "auto"
    """What lies at `path`: torch (torch.save, Lightning), safetensors, dcp, accelerate or trainer; `auto` looks."""

    replicas: Annotated[StrictInt, Field(ge=0, le=3)] = 0
    """Copies of the newest checkpoint that are kept on other machines, the last one too, for when its own is lost."""


class DataSpec(Model):
    """Something to read: fetched before the command starts, kept on the node, and shown read-only."""

    uri: f.DataUri
    """`s3://BUCKET/PREFIX` (also gs, az, abfs), `POOL:PATH` in a pool's storage (`POOL:JOB/output/…` is what a job has
    left), or a file or folder of the machine that submits; in a file that is relative to the file."""

    mount: f.MountPath
    """Where it is seen in the job's folder. A single file lies in it where this ends with `/`, else is it."""

    sha256: f.Sha256 = ""
    """What it must be: of a file as `sha256sum` prints it, of a folder as docs/guides/jobs.md says."""

    @property
    def path(self) -> str:
        """`mount` without `.` and doubled slashes."""
        return "/".join(part for part in self.mount.split("/") if part not in ("", "."))


class WorkSpec(Model):
    """How much work the job is: a number of steps, or hours on one device of a kind."""

    steps: f.Steps | None = None
    """Steps of the whole run, counted as the job reports them: `ctx.report(step, …)`."""

    hours: f.Hours | None = None
    """Hours that it takes one device of the kind `on`."""

    on: f.DeviceKind | None = None
    """The kind that `hours` is about, e.g. nvidia:H100."""

    @model_validator(mode="after")
    def _one_measure(self) -> "WorkSpec":
        if self.steps is not None and self.hours is not None:
            raise WrongValueError("has both steps and hours", "keep one of them")
        if self.hours is not None and self.on is None:
            remedy = "add `on`, the kind of device that they are hours of, e.g. on: nvidia:H100"
            raise WrongValueError("is required beside hours", remedy, "on")
        if self.hours is None and self.on is not None:
            raise WrongValueError("says which device `hours` is of, and no hours are given", "add hours", "on")
        if self.steps is None and self.hours is None:
            raise WrongValueError("is empty", "write {steps: 1000} or {hours: 3, on: nvidia:H100}")
        return self

    @property
    def parsed(self) -> Declared:
        return Declared(self.steps or 0, self.hours or 0.0, self.on or "")


DATA_AT_MOST = 32


def check_mounts(data: "tuple[DataSpec, ...]") -> None:
    """None is where another one is, or inside of it: that would be written into. Raises WrongValueError."""
    for index, one in enumerate(data):
        for other in data[:index]:
            if f"{one.path}/".startswith(f"{other.path}/") or f"{other.path}/".startswith(f"{one.path}/"):
                told = f"mounts {one.uri} at {one.mount!r}, and {other.uri} is at {other.mount!r}"
                raise WrongValueError(told, "give each its own folder, none inside of another")


_PLAIN = CandidateSpec()


def _wanted(own: CandidateSpec, base: ResourceSpec) -> tuple[DeviceRequest, ...]:
    """A candidate's devices; a number of its own replaces the one inherited with the devices."""
    if own.accelerators is not None:
        wanted = written.accelerators(own.accelerators)
        number = own.count if own.count is not None else base.count
        return tuple(w if number is None or w.counted else counted(w, number) for w in wanted)
    wanted = written.accelerators("any" if base.accelerators is None else base.accelerators)
    if own.count is not None:
        return tuple(counted(DeviceRequest(w.kinds), own.count) for w in wanted)
    return tuple(w if base.count is None else counted(w, base.count) for w in wanted)
