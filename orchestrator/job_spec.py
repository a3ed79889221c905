"""What a user writes for a job, checked: `JobSpec`. `polyfleet schema job` prints it as JSON Schema.

A spec keeps what was written (strings such as `nvidia:H100:8` or `5m`), so that it can be stored, shown and read again;
`to_job` turns it into numbers and kinds. Secrets are named by reference: a spec never carries their values.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt, field_validator, model_validator

from cluster import strict_yaml
from cluster.errors import SpecError, UserError
from cluster.validation_errors import validate_model
from orchestrator import deadlines, entry_check
from orchestrator import job_spec_fields as f
from orchestrator.checkpoint_address import of_this_machine
from orchestrator.core.model import Candidate, Data, Declared, Job
from orchestrator.job_spec_memory import MemorySpec, Model
from orchestrator.job_spec_parts import (
    DATA_AT_MOST,
    CandidateSpec,
    CheckpointSpec,
    DataSpec,
    RecoverySpec,
    ResourceSpec,
    WorkSpec,
    check_mounts,
)
from orchestrator.resource_syntax import DeviceRequest, size_bytes
from workers.messages import ScriptCheckpoint

TASKS_OF: dict[str, tuple[str, ...]] = {
    "entry": ("prepare", "train", "benchmark"),
    "arguments": ("prepare", "train", "benchmark"),
    "precision": ("prepare", "train", "benchmark"),
    "batch_size": ("train", "benchmark"),
    "seed": ("prepare", "train", "benchmark"),
    "checkpoint": ("train", "run"),
    "command": ("run",),
    "launch": ("run",),
}
"""Fields that only some tasks read; in a job of another task they are refused, not ignored."""


class JobSpec(Model):
    """A job: what to run, on which devices, and what to do when it is interrupted."""

    name: f.Name
    """What the job is called; as the task unless said."""

    task: Literal["prepare", "train", "benchmark", "run"]
    """`run` when only a command is given, else `train`."""

    entry: f.Entry = ""
    """`file.py:function` or `module:function`: the training function (`train` unless said), or what makes a model."""

    command: f.Command = ""
    """A line for the shell, or the words of one command."""

    launch: f.Launch = ""
    """How a command is started: `node` (unless said) once per node, without torchrun's variables; `ranks` once per
    device, with all of them."""

    arguments: dict[str, Any] = Field(default_factory=dict)
    """What the task and the user's function read: `ctx.arguments`."""

    working_dir: str = ""
    """Folder that is sent along; a path in a file is relative to that file."""

    env: f.Variables = Field(default_factory=dict)
    secrets: f.Secrets = Field(default_factory=dict)
    """NAME: env:NAME (a variable of the server) or file:/absolute/path."""

    resources: ResourceSpec = Field(default_factory=cache(ResourceSpec))
    data: Annotated[tuple[DataSpec, ...], Field(max_length=DATA_AT_MOST)] = ()
    """What the job reads: fetched before it starts, cached on its nodes, seen read-only in its folder."""

    output_limit: f.Size = None
    """The most that the job's folder of files ($POLYFLEET_OUTPUT_DIR) may take on a node, e.g. 50GB; the pool may allow
    less. A job that writes more fails."""

    precision: f.Precision = ""
    batch_size: f.BatchSize = 0
    """Of one rank; of a training with a range of devices, of all ranks together."""

    seed: Annotated[StrictInt, Field(ge=0, lt=2**63)] = 0
    """Of all random streams, `ctx.seed`."""

    priority: Annotated[StrictInt, Field(ge=-1000, le=1000)] = 0
    project: f.ProjectName = ""
    """Whose quota it counts against, as the fleet file has it."""

    weight: f.Weight = 1.0
    """How much the job counts among those of its priority: with 2.5 as much as two and a half others."""

    objective: Literal["any", "throughput", "cost", "energy", "finish_time", "deadline"] = "any"
    deadline: f.Deadline = None
    """When the job has to be done: a time with its zone (2026-12-01T18:00:00Z), or so long after it is submitted, e.g.
    6h."""

    workload: f.Workload = ""
    """What it computes, as benchmarks name it (`gpt2`, or what `benchmark run --workload` was given): with an objective
    of throughput, cost or energy it goes where that was measured best. Left out, the submitted folder itself is
    the name."""

    work: WorkSpec | None = None
    """How much work it is, for the order in which jobs run: {steps: 1000}, or {hours: 3, on: nvidia:H100}. What the job
    reports while it runs (`ctx.report(step, of=…)`) counts before it."""

    recovery: RecoverySpec = Field(default_factory=cache(RecoverySpec))
    checkpoint: CheckpointSpec = Field(default_factory=cache(CheckpointSpec))

    @model_validator(mode="before")
    @classmethod
    def _task_and_place(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        _refuse_misplaced(data)
        task = data.get("task") or ("run" if data.get("command") and not data.get("entry") else "train")
        return {**data, "task": task, "name": data.get("name") or str(task)}

    @field_validator("data")
    @classmethod
    def _mounts_apart(cls, data: tuple[DataSpec, ...]) -> tuple[DataSpec, ...]:
        check_mounts(data)
        return data

    @model_validator(mode="after")
    def _fields_of_the_task(self) -> "JobSpec":
        _check_fields(self)
        return self

    @property
    def argv(self) -> tuple[str, ...]:
        """The words of the job's own command; empty where it has none."""
        return _words(self.command)

    def to_job(self, job_id: str, now_s: float) -> Job:
        """What the core sees. Its candidates hold the job's own values where they override nothing. Raises SpecError
        where its deadline is past."""
        return Job(
            id=job_id,
            name=self.name,
            task=self.task,
            candidates=tuple(self._candidate(own, wanted) for own, wanted in self.resources.alternatives()),
            ordered=self.resources.in_order,
            priority=self.priority,
            objective=self.objective,
            workload=self.workload,
            submitted_s=now_s,
            recovery=self.recovery.parsed,
            entry=self.entry,
            seed=self.seed,
            secrets=dict(self.secrets),
            keep_checkpoints=self.checkpoint.keep,
            resume_from=self.checkpoint.resume_from,
            output_limit_bytes=size_bytes(self.output_limit) if self.output_limit is not None else 0,
            data=tuple(Data(one.uri, one.mount, one.sha256) for one in self.data),
            replicas=self.checkpoint.replicas,
            weight=self.weight,
            project=self.project,
            deadline_s=deadlines.wall_s(self.deadline, now_s) if self.deadline is not None else 0.0,
            work=self.work.parsed if self.work else Declared(),
        )

    def _candidate(self, own: CandidateSpec, wanted: DeviceRequest) -> Candidate:
        whole, nodes = self._whole_batch(own, wanted), own.nodes or self.resources.nodes or 1
        batch_size = own.batch_size or self.batch_size
        fewest, most = (whole.counts[0], whole.counts[-1]) if whole else (wanted.min_count, wanted.count)
        return Candidate(
            kinds=wanted.kinds,
            count=most,
            min_count=fewest,
            whole_batch=whole is not None,
            nodes=nodes,
            pool=own.pool or ("" if own.pools else self.resources.pool),
            pools=own.pools or (() if own.pool else self.resources.pools),
            not_pools=own.exclude_pools or self.resources.exclude_pools,
            dtypes=own.dtypes or self.resources.dtypes,
            features=own.features or self.resources.features,
            node=own.node or self.resources.node,
            memory_bytes=self._memory_bytes(own, -(-batch_size // (fewest * nodes)) if whole else batch_size),
            memory_estimated=isinstance(self._memory(own), MemorySpec),
            precision=own.precision or self.precision,
            batch_size=batch_size,
            environment=self.env | own.env,
            command=_words(own.command or self.command),
            launch=own.launch or self.launch or "node",
            arguments=self._script_checkpoint() or self.arguments | own.arguments,
            exclusive=self.resources.is_exclusive(own),
            max_price=own.max_price or self.resources.max_price or 0.0,
        )

    def _memory(self, own: CandidateSpec) -> Any:
        return own.memory if own.memory is not None else self.resources.memory

    def _memory_bytes(self, own: CandidateSpec, batch_size: int) -> int:
        """Of one device, `batch_size` being of one as well."""
        memory = self._memory(own)
        if isinstance(memory, MemorySpec):
            return memory.estimated(self.task, batch_size, own.precision or self.precision).total_bytes
        return size_bytes(memory) if memory is not None else 0

    def _whole_batch(self, own: CandidateSpec, wanted: DeviceRequest) -> Candidate | None:
        """The range and the batch that is divided among it; None where a batch is of one rank. Raises SpecError where
        no number of the range divides it.
        """
        batch_size, nodes = own.batch_size or self.batch_size, own.nodes or self.resources.nodes or 1
        if self.task != "train" or not batch_size or wanted.min_count == wanted.count:
            return None
        whole = Candidate(wanted.kinds, wanted.count, wanted.min_count, nodes, batch_size=batch_size, whole_batch=True)
        if not whole.counts:
            fewest, most = wanted.min_count * nodes, wanted.count * nodes
            message = f"{batch_size} divides among no number of ranks from {fewest} to {most}"
            near = -(-batch_size // fewest) * fewest
            raise SpecError("batch_size", message, f"write a multiple of {fewest}, e.g. {near}")
        return whole

    def _script_checkpoint(self) -> dict[str, Any]:
        """All that a command's node is told beside the command."""
        written = self.checkpoint
        return ScriptCheckpoint(written.path, written.format).to_plain() if written.path else {}


def parse_job(data: dict[str, Any], source: str = "") -> JobSpec:
    """Raises SpecError with the dotted field, what is wrong and what to write, such as the nearest valid key."""
    return validate_model(JobSpec, data, source)


def load_job(path: Path) -> JobSpec:
    """The job in a YAML file, its `working_dir` made absolute. Raises UserError or SpecError naming the file."""
    return _placed(parse_job(strict_yaml.load(_read(path), str(path), JobSpec), str(path)), path)


def load_jobs(path: Path) -> list[JobSpec]:
    """The jobs in a YAML file of one or several documents, parted by `---`. Raises as `load_job`."""
    documents = strict_yaml.load_all(_read(path), str(path), JobSpec)
    if len(documents) == 1:
        return [_placed(parse_job(documents[0], str(path)), path)]
    return [_placed(parse_job(data, f"{path}, job {n}"), path) for n, data in enumerate(documents, 1)]


def _placed(spec: JobSpec, path: Path) -> JobSpec:
    """With its folder, and its data of this machine, found from where the file lies."""
    spec = spec.model_copy(update={"resources": spec.resources.read(path)})
    if any(of_this_machine(one.uri) for one in spec.data):
        spec = spec.model_copy(update={"data": tuple(_placed_data(one, path) for one in spec.data)})
    if not spec.working_dir:
        if entry_check.is_in_folder(spec.entry):
            raise SpecError("working_dir", f"is required: {spec.entry} is a file in it", "write working_dir: .")
        return spec
    return spec.model_copy(update={"working_dir": str(_folder(spec.working_dir, path))})


def _placed_data(data: DataSpec, path: Path) -> DataSpec:
    if not of_this_machine(data.uri):
        return data
    return data.model_copy(update={"uri": str((path.parent / Path(data.uri).expanduser()).absolute())})


def _folder(written: str, beside: Path) -> Path:
    try:
        folder = (beside.parent / Path(written).expanduser()).resolve(strict=True)
        found = folder.is_dir()
    except (OSError, RuntimeError):  # RuntimeError: links in a circle, or ~NAME of nobody
        found = False
    if not found:
        remedy = f"create it; the path is relative to {beside}"
        raise SpecError("working_dir", f"there is no folder {beside.parent / written}", remedy)
    return folder


def job_schema() -> dict[str, Any]:
    """JSON Schema of a job's file."""
    schema = JobSpec.model_json_schema()
    del schema["required"]  # name and task are guessed
    for model in ("ResourceSpec", "CandidateSpec"):
        properties = schema["$defs"][model]["properties"]
        properties["gpus"] = properties["accelerators"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Polyfleet job"}


def _words(command: Any) -> tuple[str, ...]:
    """A line goes to the shell."""
    return ("/bin/sh", "-c", command) if command and isinstance(command, str) else tuple(command)


PARTS: tuple[tuple[str, type[Model]], ...] = (
    *(("resources", ResourceSpec), ("recovery", RecoverySpec), ("checkpoint", CheckpointSpec), ("work", WorkSpec)),
)


def _refuse_misplaced(data: dict[str, Any]) -> None:
    """A key known one level down is not unknown: say where it belongs."""
    for key in data.keys() - JobSpec.model_fields.keys():
        for name, model in PARTS:
            if key in model.model_fields or (key, name) == ("gpus", "resources"):
                raise SpecError(key, f"belongs under `{name}`", f"write {name}: {{{key}: …}}")


def _check_fields(spec: JobSpec) -> None:
    """Every field that is set is one the task reads, and it has what it needs. Raises SpecError."""
    for place, part in _places(spec):
        written = part.model_fields_set
        for field, tasks in TASKS_OF.items():
            if field in written and spec.task not in tasks and _differs(part, field):
                message = f"is read by {', '.join(tasks)} jobs, this one is {spec.task}"
                raise SpecError(f"{place}{field}", message, _instead(spec.task))
    _check_checkpoint(spec)
    if spec.objective == "deadline" and spec.deadline is None:
        raise SpecError("deadline", "is required with objective: deadline", deadlines.FORMS)
    for own, wanted in spec.resources.alternatives():
        spec._whole_batch(own, wanted)
    if spec.task == "run":
        if not all(own.command or spec.command for own, _ in spec.resources.alternatives()):
            raise SpecError("command", "a run job needs a command", "e.g. command: python train.py")
        return
    if spec.task == "benchmark" and spec.arguments.get("session"):
        return  # it measures what a run over the fleet tells it to
    if not spec.entry:
        raise SpecError("entry", f"a {spec.task} job needs an entry", "write file.py:function or module:function")
    if spec.task != "train" and ":" not in spec.entry:
        raise SpecError("entry", f"{spec.entry} names no function", f"write {spec.entry}:NAME, which makes the model")


OF_SCRIPTS = ("path", "format")
"""Fields of `checkpoint` that `run` jobs read; the others are of `train` jobs."""


def _check_checkpoint(spec: JobSpec) -> None:
    """Raises SpecError."""
    part = spec.checkpoint
    for field in part.model_fields_set:
        task = "run" if field in OF_SCRIPTS else "train"
        if spec.task != task and _differs(part, field):
            told = "it saves with ctx.checkpoint" if task == "run" else "write checkpoint: {path: ckpt.pt}"
            raise SpecError(f"checkpoint.{field}", f"is read by {task} jobs, this one is {spec.task}", told)
    if part.format != "auto" and not part.path:
        raise SpecError("checkpoint.format", "says what lies at checkpoint.path, which is not given", "add path")


def _places(spec: JobSpec) -> Iterator[tuple[str, Model]]:
    yield "", spec
    for name in ("any_of", "ordered"):
        for index, candidate in enumerate(getattr(spec.resources, name)):
            yield f"resources.{name}.{index}.", candidate


def _differs(part: Model, field: str) -> bool:
    return bool(getattr(part, field) != _default(type(part), field))


@cache
def _default(kind: type[Model], field: str) -> Any:
    return kind.model_fields[field].get_default(call_default_factory=True, validated_data={})


def _instead(task: str) -> str:
    return "put it into the command or env" if task == "run" else "leave it out"


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(strict_yaml.MAX_BYTES + 1).decode()
    except OSError as e:
        raise UserError(f"{path}: {e.strerror}", "name a YAML file with a job in it") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text", "save the file as UTF-8") from None
