"""The parts of a job's spec below its top level: devices and candidates, recovery, checkpoints."""

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from cluster.validation import WrongValueError, in_field
from orchestrator import resources as written
from orchestrator import spec_fields as f
from orchestrator.core.model import Recovery
from orchestrator.resources import Wanted, counted, duration_s, hang_after_s


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True)


class Shape(Model):
    """Which devices, and how many."""

    accelerators: f.Accelerators = None
    """`nvidia:H100:8`, `tpu:v5e:4`, `cpu:1`, `any`; a range `nvidia:H100:2..8`; a list (in that order); a mapping
    {H100: 8, A100: 8} (any of them). `gpus` is the same."""

    count: f.Number = None
    """Devices per node, where `accelerators` does not say: 8, 2..8 or 8+."""

    nodes: f.Count | None = None
    """Nodes of one island (same back end, environment and kind), 1 unless said."""

    memory: f.Size = None
    """Least memory of each device, e.g. 40GB."""

    pool: str = ""
    """Only nodes of this pool."""

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

    @field_validator("count")
    @classmethod
    def _count_once(cls, count: Any, info: ValidationInfo) -> Any:
        asked = info.data.get("accelerators")
        if count is not None and asked is not None:
            for wanted in written.accelerators(asked):
                in_field(counted, wanted, count)
        return count


class CandidateSpec(Shape):
    """One acceptable way to run the job; what it leaves out is as the job says."""

    precision: f.Precision = ""
    batch_size: f.BatchSize = 0
    env: f.Variables = Field(default_factory=dict)
    command: f.Command = ""
    arguments: dict[str, Any] = Field(default_factory=dict)


class Resources(Shape):
    """One shape, or candidates that take from it what they leave out."""

    any_of: Annotated[tuple[CandidateSpec, ...], Field(max_length=32)] = ()
    """Any of these, the best that is free."""

    ordered: Annotated[tuple[CandidateSpec, ...], Field(max_length=32)] = ()
    """The first of these that is free."""

    @model_validator(mode="after")
    def _one_list(self) -> "Resources":
        if self.any_of and self.ordered:
            raise WrongValueError("has both any_of and ordered", "keep one of them")
        return self

    @model_validator(mode="after")
    def _whole_or_counted(self) -> "Resources":
        if not any(one.exclusive for one in (self, *self.any_of, *self.ordered)):
            return self
        for own, wanted in self.alternatives():
            if self.is_exclusive(own) and wanted.counted:
                told = f"exclusive takes all {','.join(wanted.kinds)} devices of a node, and a number is given as well"
                raise WrongValueError(told, "keep one of them")
        return self

    def is_exclusive(self, own: CandidateSpec) -> bool:
        return bool(self.exclusive if own.exclusive is None else own.exclusive)

    @property
    def in_order(self) -> bool:
        return bool(self.ordered) or (not self.any_of and isinstance(self.accelerators, list | tuple))

    def alternatives(self) -> Iterator[tuple[CandidateSpec, Wanted]]:
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
    """How long an attempt runs on without hearing from the server or the cluster's head; at least 3 s. It has no effect
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
        if duration_s(lease) < 3:
            raise WrongValueError(f"{lease} is too short", "write at least 3s: it is renewed over the network")
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


_PLAIN = CandidateSpec()


def _wanted(own: CandidateSpec, base: Resources) -> tuple[Wanted, ...]:
    """A candidate's devices; a number of its own replaces the one inherited with the devices."""
    if own.accelerators is not None:
        wanted = written.accelerators(own.accelerators)
        number = own.count if own.count is not None else base.count
        return tuple(w if number is None or w.counted else counted(w, number) for w in wanted)
    wanted = written.accelerators("any" if base.accelerators is None else base.accelerators)
    if own.count is not None:
        return tuple(counted(Wanted(w.kinds), own.count) for w in wanted)
    return tuple(w if base.count is None else counted(w, base.count) for w in wanted)
