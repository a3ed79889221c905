"""Specification of a job as users write it, validated: `JobSpec`. `polyfleet schema job` prints its JSON Schema.

A spec keeps the text that was written (such as `nvidia:H100:8` or `5m`), so that it can be stored, printed and read
again; `to_job` converts it to numbers and kinds. Secrets are references: a spec never contains their values.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, field_validator, model_validator

from cluster.errors import SpecError, UserError, nearest
from cluster.input import strict_yaml
from cluster.input.sizes import size_bytes
from cluster.input.validation_errors import validate_model
from orchestrator.core.model import Candidate, Job
from orchestrator.spec import deadlines, entry_check
from orchestrator.spec import job_spec_fields as f
from orchestrator.spec.checkpoint_address import is_local_path
from orchestrator.spec.core_fields import core_fields, inherited_fields
from orchestrator.spec.job_spec_memory import MemorySpec, Model
from orchestrator.spec.job_spec_parts import (
    MAX_DATA,
    CandidateSpec,
    CheckpointSpec,
    DataSpec,
    RecoverySpec,
    ResourceSpec,
    WorkSpec,
    check_mounts,
)
from orchestrator.spec.resource_syntax import DeviceRequest
from workers.protocol.messages import ScriptCheckpoint

TASKS_BY_FIELD: dict[str, tuple[str, ...]] = {
    "entry": ("prepare", "train", "benchmark"),
    "arguments": ("prepare", "train", "benchmark"),
    "precision": ("prepare", "train", "benchmark"),
    "batch_size": ("train", "benchmark"),
    "seed": ("prepare", "train", "benchmark"),
    "checkpoint": ("train", "run"),
    "command": ("run",),
    "launch": ("run",),
}
"""Tasks that read a field; in a job of another task the field is refused, not ignored."""


class JobSpec(Model):
    """A job: what to run, on which devices, and what to do when it is interrupted."""

    name: f.Name
    """Name of the job (default: the task)."""

    task: Literal["prepare", "train", "benchmark", "run"]
    """Default: `run` with only a command, else `train`."""

    entry: f.Entry = ""
    """`file.py:function` or `module:function`: the training function (default: `train`), or the one that creates a
    model.
    """

    command: f.Command = ""
    """A command line for the shell, or a list of the program and its arguments."""

    launch: f.Launch = ""
    """How a command is started: `node` (default): once per node, without torchrun's variables; `ranks`: once per
    device, with all of them.
    """

    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments for the task and the user's function: `ctx.arguments`."""

    working_dir: str = ""
    """Folder that is sent with the job; in a file, the path is relative to that file."""

    env: f.Variables = Field(default_factory=dict)
    secrets: f.Secrets = Field(default_factory=dict)
    """NAME: env:NAME (a variable of the server) or file:/absolute/path."""

    resources: ResourceSpec = Field(default_factory=cache(ResourceSpec))
    data: Annotated[tuple[DataSpec, ...], Field(max_length=MAX_DATA)] = ()
    """Data that the job reads: fetched before it starts, cached on its nodes, mounted read-only in its folder."""

    output_limit: f.Size = None
    """Maximum size of the job's output folder ($POLYFLEET_OUTPUT_DIR) on a node, e.g. 50GB; the pool may allow less. A
    job that writes more fails."""

    precision: f.Precision = ""
    batch_size: f.BatchSize = 0
    """Batch size of one rank; for a training with a range of devices, of all ranks together."""

    seed: Annotated[StrictInt, Field(ge=0, lt=2**63)] = 0
    """Seed of all random number streams: `ctx.seed`."""

    priority: Annotated[StrictInt, Field(ge=-1000, le=1000)] = 0
    preemptible: StrictBool = True
    """false: the job is never stopped or moved for another job, whatever its priority, and its project borrows no
    devices for it. It still stops if it is cancelled or migrated, or if its node is drained or shut down."""

    project: f.ProjectName = ""
    """Project whose quota the job uses, as named in the fleet file."""

    weight: f.Weight = 1.0
    """Weight of the job among those of its priority: 2.5 counts as much as two and a half other jobs."""

    objective: Literal["any", "throughput", "cost", "energy", "finish_time", "deadline"] = "any"
    deadline: f.Deadline = None
    """Time by which the job must end: with a time zone (2026-12-01T18:00:00Z), or a duration after the submission, e.g.
    6h."""

    workload: f.Workload = ""
    """Workload as benchmarks name it (`gpt2`, or the name passed to `benchmark run --workload`). With an objective of
    throughput, cost or energy, the job is placed where this workload was measured best. Default: the submitted folder
    itself identifies the workload."""

    work: WorkSpec | None = None
    """Amount of work, for the order in which jobs run: {steps: 1000}, or {hours: 3, on: nvidia:H100}. What the job
    reports while it runs (`ctx.report(step, of=…)`) takes precedence.
    """

    recovery: RecoverySpec = Field(default_factory=cache(RecoverySpec))
    checkpoint: CheckpointSpec = Field(default_factory=cache(CheckpointSpec))

    @model_validator(mode="before")
    @classmethod
    def _set_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        _check_levels(data)
        task = data.get("task") or ("run" if data.get("command") and not data.get("entry") else "train")
        return {**data, "task": task, "name": data.get("name") or str(task)}

    @field_validator("data")
    @classmethod
    def _check_mounts(cls, data: tuple[DataSpec, ...]) -> tuple[DataSpec, ...]:
        check_mounts(data)
        return data

    @model_validator(mode="after")
    def _check_task_fields(self) -> "JobSpec":
        _check_fields(self)
        return self

    @property
    def argv(self) -> tuple[str, ...]:
        """Program and arguments of the job's own command; empty if it has none."""
        return f.command_arguments(self.command)

    def to_job(self, job_id: str, now_s: float) -> Job:
        """Convert to the planner's Job. Candidates take the job's own values for what they do not override. Raises
        SpecError if the deadline is in the past."""
        parts: dict[str, Any] = {"recovery": self.recovery.parsed, "data": tuple(one.parsed for one in self.data)}
        if self.work:
            parts["work"] = self.work.parsed
        return Job(
            id=job_id,
            candidates=tuple(self._candidate(own, request) for own, request in self.resources.alternatives()),
            ordered=self.resources.in_order,
            submitted_s=now_s,
            deadline_s=deadlines.wall_s(self.deadline, now_s) if self.deadline is not None else 0.0,
            **core_fields(self, Job) | core_fields(self.checkpoint, Job) | parts,
        )

    def _candidate(self, own: CandidateSpec, request: DeviceRequest) -> Candidate:
        """Convert one candidate; fields with the spec's own value arrive by name, those computed from several here."""
        range_batch, nodes = self._divided_batch(own, request), own.nodes or self.resources.nodes or 1
        batch_size = own.batch_size or self.batch_size
        min_count, max_count = (
            (range_batch.counts[0], range_batch.counts[-1]) if range_batch else (request.min_count, request.count)
        )
        batch_of_device = -(-batch_size // (min_count * nodes)) if range_batch else batch_size
        computed = {
            "kinds": request.kinds,
            "count": max_count,
            "min_count": min_count,
            "whole_batch": range_batch is not None,
            "pool": own.pool or ("" if own.pools else self.resources.pool),
            "pools": own.pools or (() if own.pool else self.resources.pools),
            "memory_bytes": self._memory_bytes(own, batch_of_device),
            "memory_estimated": isinstance(self._memory(own), MemorySpec),
            **self._script_checkpoint(),
        }
        return Candidate(**inherited_fields((own, self.resources, self), Candidate) | computed)

    def _memory(self, own: CandidateSpec) -> Any:
        return own.memory if own.memory is not None else self.resources.memory

    def _memory_bytes(self, own: CandidateSpec, batch_size: int) -> int:
        """Memory that the job needs on one device; `batch_size` is that of one device, too."""
        memory = self._memory(own)
        if isinstance(memory, MemorySpec):
            return memory.estimated(self.task, batch_size, own.precision or self.precision).total_bytes
        return size_bytes(memory) if memory is not None else 0

    def _divided_batch(self, own: CandidateSpec, request: DeviceRequest) -> Candidate | None:
        """The range of devices and the batch that is divided among them; None if the batch size is that of one rank.
        Raises SpecError if no number of devices in the range divides the batch.
        """
        batch_size, nodes = own.batch_size or self.batch_size, own.nodes or self.resources.nodes or 1
        if self.task != "train" or not batch_size or request.min_count == request.count:
            return None
        candidate = Candidate(
            request.kinds, request.count, request.min_count, nodes, batch_size=batch_size, whole_batch=True
        )
        if not candidate.counts:
            min_ranks, max_ranks = request.min_count * nodes, request.count * nodes
            message = f"{batch_size} cannot be divided evenly among any number of ranks from {min_ranks} to {max_ranks}"
            multiple = -(-batch_size // min_ranks) * min_ranks
            raise SpecError("batch_size", message, f"write a multiple of {min_ranks}, e.g. {multiple}")
        return candidate

    def _script_checkpoint(self) -> dict[str, Any]:
        """Arguments that say where a command's script saves its checkpoint, for the node; empty if the job does not."""
        path, form = self.checkpoint.path, self.checkpoint.format
        return {"arguments": ScriptCheckpoint(path, form).to_plain()} if path else {}


def parse_job(data: dict[str, Any], source: str = "") -> JobSpec:
    """Validate a job. Raises SpecError with the dotted field, the problem and what to write, e.g. the nearest key."""
    return validate_model(JobSpec, data, source)


def load_job(path: Path) -> JobSpec:
    """Load the job in a YAML file and make its `working_dir` absolute. UserError and SpecError name the file."""
    return _resolve_paths(parse_job(strict_yaml.load(_read(path), str(path), JobSpec), str(path)), path)


def load_jobs(path: Path) -> list[JobSpec]:
    """Load the jobs in a YAML file of one or several documents, separated by `---`. Raises as `load_job`."""
    documents = strict_yaml.load_all(_read(path), str(path), JobSpec)
    if len(documents) == 1:
        return [_resolve_paths(parse_job(documents[0], str(path)), path)]
    return [_resolve_paths(parse_job(data, f"{path}, job {n}"), path) for n, data in enumerate(documents, 1)]


def _resolve_paths(spec: JobSpec, path: Path) -> JobSpec:
    """Resolve paths of its working folder and local data relative to the job's file."""
    spec = spec.model_copy(update={"resources": spec.resources.read(path)})
    if any(is_local_path(one.uri) for one in spec.data):
        spec = spec.model_copy(update={"data": tuple(_resolve_data_path(one, path) for one in spec.data)})
    if not spec.working_dir:
        if entry_check.is_in_folder(spec.entry):
            raise SpecError("working_dir", f"is required: {spec.entry} is a file in it", "write working_dir: .")
        return spec
    return spec.model_copy(update={"working_dir": str(_folder(spec.working_dir, path))})


def _resolve_data_path(data: DataSpec, path: Path) -> DataSpec:
    if not is_local_path(data.uri):
        return data
    return data.model_copy(update={"uri": str((path.parent / Path(data.uri).expanduser()).absolute())})


def _folder(written: str, beside: Path) -> Path:
    try:
        folder = (beside.parent / Path(written).expanduser()).resolve(strict=True)
        is_folder = folder.is_dir()
    except (OSError, RuntimeError):  # RuntimeError: a cycle of links, or ~NAME of an unknown user
        is_folder = False
    if not is_folder:
        remedy = f"create it; the path is relative to {beside}"
        raise SpecError("working_dir", f"there is no folder {beside.parent / written}", remedy)
    return folder


def job_schema() -> dict[str, Any]:
    """JSON Schema of a job's file."""
    schema = JobSpec.model_json_schema()
    del schema["required"]  # name and task have defaults
    for model in ("ResourceSpec", "CandidateSpec"):
        properties = schema["$defs"][model]["properties"]
        properties["gpus"] = properties["accelerators"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Polyfleet job"}


def get_schema(kind: str) -> dict[str, Any]:
    """The schema of a job spec or of a fleet file. Raises UserError for another kind."""
    if kind == "job":
        return job_schema()
    if kind == "fleet":
        from cluster.fleet.fleet_spec import fleet_schema

        return fleet_schema()
    raise UserError(f"no schema {kind!r}", nearest(kind, ("job", "fleet")))


PARTS: tuple[tuple[str, type[Model]], ...] = (
    *(("resources", ResourceSpec), ("recovery", RecoverySpec), ("checkpoint", CheckpointSpec), ("work", WorkSpec)),
)


def _check_levels(data: dict[str, Any]) -> None:
    """Raise SpecError that says where a key belongs if it is valid one level below, instead of "unknown key"."""
    for key in data.keys() - JobSpec.model_fields.keys():
        for name, model in PARTS:
            if key in model.model_fields or (key, name) == ("gpus", "resources"):
                raise SpecError(key, f"belongs under `{name}`", f"write {name}: {{{key}: …}}")


def _check_fields(spec: JobSpec) -> None:
    """Check that the task reads every field that is set and that no required field is missing. Raises SpecError."""
    for prefix, part in _parts_with_fields(spec):
        written = part.model_fields_set
        for field, tasks in TASKS_BY_FIELD.items():
            if field in written and spec.task not in tasks and _differs(part, field):
                message = f"applies to {', '.join(tasks)} jobs only; this is a {spec.task} job"
                raise SpecError(f"{prefix}{field}", message, _remedy_for(spec.task))
    _check_checkpoint(spec)
    if spec.objective == "deadline" and spec.deadline is None:
        raise SpecError("deadline", "is required with objective: deadline", deadlines.FORMS)
    for own, request in spec.resources.alternatives():
        spec._divided_batch(own, request)
    if spec.task == "run":
        if not all(own.command or spec.command for own, _ in spec.resources.alternatives()):
            raise SpecError("command", "a run job needs a command", "write e.g. command: python train.py")
        return
    if spec.task == "benchmark" and spec.arguments.get("session"):
        return  # the benchmark run that started this session sends it the cases to measure
    if not spec.entry:
        raise SpecError("entry", f"a {spec.task} job needs an entry", "write file.py:function or module:function")
    if spec.task != "train" and ":" not in spec.entry:
        raise SpecError(
            "entry", f"{spec.entry} does not name a function", f"write {spec.entry}:NAME, which creates the model"
        )


SCRIPT_FIELDS = ("path", "format")
"""Fields of `checkpoint` that apply to `run` jobs; the others apply to `train` jobs."""


def _check_checkpoint(spec: JobSpec) -> None:
    """Check that the task reads the fields of `checkpoint` that are set. Raises SpecError."""
    part = spec.checkpoint
    for field in part.model_fields_set:
        task = "run" if field in SCRIPT_FIELDS else "train"
        if spec.task != task and _differs(part, field):
            remedy = "a train job saves with ctx.checkpoint" if task == "run" else "write checkpoint: {path: ckpt.pt}"
            raise SpecError(f"checkpoint.{field}", f"applies to {task} jobs only; this is a {spec.task} job", remedy)
    if part.format != "auto" and not part.path:
        raise SpecError("checkpoint.format", "is the format of checkpoint.path, which is missing", "add path")


def _parts_with_fields(spec: JobSpec) -> Iterator[tuple[str, Model]]:
    yield "", spec
    for name in ("any_of", "ordered"):
        for index, candidate in enumerate(getattr(spec.resources, name)):
            yield f"resources.{name}.{index}.", candidate


def _differs(part: Model, field: str) -> bool:
    return bool(getattr(part, field) != _default(type(part), field))


@cache
def _default(kind: type[Model], field: str) -> Any:
    return kind.model_fields[field].get_default(call_default_factory=True, validated_data={})


def _remedy_for(task: str) -> str:
    return "put it into the command or env" if task == "run" else "leave it out"


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(strict_yaml.MAX_BYTES + 1).decode()
    except OSError as e:
        raise UserError(f"{path}: {e.strerror}", "name a YAML file with a job in it") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text", "save the file as UTF-8") from None
