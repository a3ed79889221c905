"""Parts of a job's spec below its top level: devices and candidates, recovery, checkpoints, data, work."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    Field,
    StrictBool,
    StrictInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from cluster.input.validation_errors import WrongValueError, prefix_field
from orchestrator.core.model import Data, DeclaredWork, Recovery
from orchestrator.core.timing import MIN_LEASE_S
from orchestrator.spec import job_spec_fields as f
from orchestrator.spec import resource_syntax
from orchestrator.spec.core_fields import CoreForm, core_fields
from orchestrator.spec.job_spec_memory import Memory, MemorySpec, Model
from orchestrator.spec.resource_syntax import DeviceRequest, duration_s, with_count
from workers.protocol.failure_kinds import FAILURE_KINDS
from workers.protocol.messages import LEASE_S


class ResourceShape(Model):
    """Which devices, and how many."""

    accelerators: f.Accelerators = None
    """`nvidia:H100:8`, `tpu:v5e:4`, `cpu:1`, `any`; a range `nvidia:H100:2..8`; a list (in that order); a mapping
    {H100: 8, A100: 8} (any of them). `gpus` is another name for it."""

    count: f.Number = None
    """Devices per node, if `accelerators` has no number: 8, 2..8 or 8+."""

    nodes: f.Count | None = None
    """Nodes of one island: same back end, environment and kind (default: 1)."""

    memory: Memory | None = None
    """Minimum memory of each device, e.g. 40GB; or a model from whose dimensions it is estimated, e.g.
    {model: config.json, seq: 2048}."""

    max_price: f.Price | None = None
    """Maximum price of one device per hour, in the unit of `price_per_hour` of pools; a pool without a price is free.
    """

    pool: str = ""
    """Only nodes of this pool."""

    pools: f.PoolNames = ()
    """Only nodes of these pools."""

    exclude_pools: Annotated[f.PoolNames, CoreForm(name="not_pools")] = ()
    """No nodes of these pools."""

    dtypes: f.Dtypes = ()
    """Only devices that support these natively according to their documentation, e.g. [bf16] or [float8_e4m3fn]."""

    features: f.Features = ()
    """Only devices that have these according to their documentation, e.g. [flash_attention] or [collectives=nccl]."""

    node: str = ""
    """Only this node, as `polyfleet inventory` names it."""

    exclusive: StrictBool | None = None
    """All devices of the kind on each node, once no other job uses any of them; instead of a number."""

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
        accelerators = info.data.get("accelerators")
        if count is not None and accelerators is not None:
            for request in resource_syntax.accelerators(accelerators):
                prefix_field(with_count, request, count)
        return count


class CandidateSpec(ResourceShape):
    """One acceptable set of resources for the job; fields that it leaves out have the job's values."""

    precision: f.Precision = ""
    batch_size: f.BatchSize = 0
    env: f.Variables = Field(default_factory=dict)
    command: f.Command = ""
    launch: f.Launch = ""
    arguments: dict[str, Any] = Field(default_factory=dict)


def _read(shape: ResourceShape, beside: Path) -> dict[str, Any]:
    return {"memory": shape.memory.read(beside)} if isinstance(shape.memory, MemorySpec) else {}


class ResourceSpec(ResourceShape):
    """Devices of the job, or candidates, which inherit the fields that they leave out."""

    any_of: Annotated[tuple[CandidateSpec, ...], Field(max_length=32)] = ()
    """Candidates: the best one that is free is used."""

    ordered: Annotated[tuple[CandidateSpec, ...], Field(max_length=32)] = ()
    """Candidates: the first one that is free is used."""

    @model_validator(mode="after")
    def _one_list(self) -> "ResourceSpec":
        if self.any_of and self.ordered:
            raise WrongValueError("has both any_of and ordered", "keep one of them")
        return self

    @model_validator(mode="after")
    def _check_exclusive(self) -> "ResourceSpec":
        if not any(one.exclusive for one in (self, *self.any_of, *self.ordered)):
            return self
        for own, request in self.alternatives():
            if self.is_exclusive(own) and request.has_count:
                message = f"exclusive takes all {','.join(request.kinds)} devices of a node, but a number is also set"
                raise WrongValueError(message, "keep one of them")
        return self

    def is_exclusive(self, own: CandidateSpec) -> bool:
        return bool(self.exclusive if own.exclusive is None else own.exclusive)

    def read(self, beside: Path) -> "ResourceSpec":
        """Replace paths of model files by the dimensions in them."""
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
        """Yield each candidate with each of its device requests: a list or mapping of accelerators has several."""
        for candidate in self.ordered or self.any_of or (_PLAIN,):
            for request in _device_requests(candidate, self):
                yield candidate, request


if TYPE_CHECKING:
    Failing = str
else:
    Failing = Literal[*FAILURE_KINDS]
Reaction = Literal["restart", "retry", "next", "fail", "ignore"]


class RecoverySpec(Model):
    """Retries. A failure of the job's code counts as a restart, a lost node or a preemption as an interruption."""

    max_restarts: Annotated[StrictInt, Field(ge=-1)] = 0
    """-1: no limit."""

    max_interruptions: Annotated[StrictInt, Field(ge=-1)] = -1
    retry_exit_codes: tuple[Annotated[StrictInt, Field(ge=1, le=255)], ...] = ()
    """Exit codes that count as interruptions, not as restarts."""

    backoff: f.Duration = "1s"
    """First pause; it doubles up to 60 s."""

    lease: f.Duration = f"{LEASE_S:.0f}s"
    """How long an attempt keeps running without contact to the server or the cluster's head; at least 5 s. It has no
    effect with `on_disconnect: wait`."""

    grace: f.Duration = "30s"
    """Time that an attempt has to save a checkpoint before it is stopped."""

    on_events: dict[Failing, Reaction] = Field(default_factory=dict)
    """Reaction to a kind of failure, e.g. {oom: next, hang: retry}: `restart` counts against max_restarts, `retry` as
    an interruption, `next` restarts with the next candidate, `fail` ends the job. {nan: ignore} lets a training
    continue whose loss is NaN or infinite.
    """

    cross_vendor: StrictBool = True
    """Whether a restart may use a candidate of another back end than the one the job last ran on."""

    on_disconnect: Literal["restart", "wait", "stop"] = "restart"
    """If the node of an attempt cannot be reached: restart elsewhere once its lease has expired, wait for the node, or
    stop the job."""

    hang_after: f.HangAfter = ""
    """How long ranks may make no progress, e.g. 10m, or `never` (default: for `train`, twice their 99th percentile
    step, at least 60 s; no limit for other tasks).
    """

    @field_validator("on_events")
    @classmethod
    def _check_ignored(cls, on_events: dict[str, str]) -> dict[str, str]:
        for kind, reaction in on_events.items():
            setting = FAILURE_KINDS[kind].ignored_by
            if reaction == "ignore" and setting != "on_events":
                remedy = f"write `{setting}`" if setting else "write restart, retry, next or fail"
                raise WrongValueError(f"{kind} cannot be ignored", remedy)
        return on_events

    @field_validator("lease")
    @classmethod
    def _long_enough(cls, lease: Any) -> Any:
        if duration_s(lease) < MIN_LEASE_S:
            reason = "a node cannot renew a shorter one in time while the server is silent"
            raise WrongValueError(f"{lease} is too short", f"write at least {MIN_LEASE_S:.0f}s: {reason}")
        return lease

    @cached_property
    def parsed(self) -> Recovery:
        """The planner's Recovery. Cached, because most jobs share the default spec."""
        return Recovery(**core_fields(self, Recovery))


class CheckpointSpec(Model):
    keep: Annotated[StrictInt, Field(ge=1, le=1000), CoreForm(name="keep_checkpoints")] = 3
    """Number of newest checkpoints to keep."""

    resume_from: f.ResumeFrom = ""
    """Start from this checkpoint: POOL:PATH, or PATH in the pool the job runs in."""

    path: f.ScriptPath = ""
    """For `run` jobs: the file or folder in `$POLYFLEET_OUTPUT_DIR` that the script saves to and resumes from, such as
    ckpt.pt. `keep` and `resume_from` apply to `train` jobs."""

    format: f.ScriptFormat = "auto"
    """Format of `path`: torch (torch.save, Lightning), safetensors, dcp, accelerate or trainer (auto: detected)."""

    replicas: Annotated[StrictInt, Field(ge=0, le=3)] = 0
    """Copies of the newest checkpoint, the job's last one included, on other machines, in case its own is lost."""


class DataSpec(Model):
    """Input data: fetched before the command starts, cached on the node, and mounted read-only."""

    uri: f.DataUri
    """`s3://BUCKET/PREFIX` (also gs, az, abfs), `POOL:PATH` in a pool's storage (`POOL:JOB/output/…` is the output of a
    job), or a file or folder of the machine that submits; in a job's file, the path is relative to that file."""

    mount: f.MountPath
    """Path in the job's folder. If it ends with `/`, a single file is put into that folder, else it gets that name."""

    sha256: f.Sha256 = ""
    """Expected hash: of a file as `sha256sum` prints it, of a folder as in docs/guides/jobs.md."""

    @property
    def parsed(self) -> Data:
        return Data(**core_fields(self, Data))

    @property
    def path(self) -> str:
        """`mount` without `.` and doubled slashes."""
        return "/".join(part for part in self.mount.split("/") if part not in ("", "."))


class WorkSpec(Model):
    """Amount of work of the job: a number of steps, or hours on one device of a kind."""

    steps: f.Steps | None = None
    """Steps of the complete run, as the job reports them: `ctx.report(step, …)`."""

    hours: f.Hours | None = None
    """Hours that one device of the kind `on` needs for the job."""

    on: f.DeviceKind | None = None
    """Kind of device for `hours`, e.g. nvidia:H100."""

    @model_validator(mode="after")
    def _one_measure(self) -> "WorkSpec":
        if self.steps is not None and self.hours is not None:
            raise WrongValueError("has both steps and hours", "keep one of them")
        if self.hours is not None and self.on is None:
            remedy = "add `on`, the kind of device that needs those hours, e.g. on: nvidia:H100"
            raise WrongValueError("is required with hours", remedy, "on")
        if self.hours is None and self.on is not None:
            raise WrongValueError("is the kind of device for `hours`, which is missing", "add hours", "on")
        if self.steps is None and self.hours is None:
            raise WrongValueError("is empty", "write {steps: 1000} or {hours: 3, on: nvidia:H100}")
        return self

    @property
    def parsed(self) -> DeclaredWork:
        return DeclaredWork(**core_fields(self, DeclaredWork))


MAX_DATA = 32


def check_mounts(data: "tuple[DataSpec, ...]") -> None:
    """Raise WrongValueError if a mount equals another or is inside another, since data is mounted read-only."""
    for index, one in enumerate(data):
        for other in data[:index]:
            if f"{one.path}/".startswith(f"{other.path}/") or f"{other.path}/".startswith(f"{one.path}/"):
                message = f"mounts {one.uri} at {one.mount!r}, but {other.uri} is mounted at {other.mount!r}"
                raise WrongValueError(message, "mount each at its own path, none inside another")


_PLAIN = CandidateSpec()


def _device_requests(own: CandidateSpec, base: ResourceSpec) -> tuple[DeviceRequest, ...]:
    """Device requests of a candidate; its own number replaces the one inherited with the devices."""
    if own.accelerators is not None:
        requests = resource_syntax.accelerators(own.accelerators)
        number = own.count if own.count is not None else base.count
        return tuple(w if number is None or w.has_count else with_count(w, number) for w in requests)
    requests = resource_syntax.accelerators("any" if base.accelerators is None else base.accelerators)
    if own.count is not None:
        return tuple(with_count(DeviceRequest(w.kinds), own.count) for w in requests)
    return tuple(w if base.count is None else with_count(w, base.count) for w in requests)
