"""Classes that describe a job in Python, and the handle of a submitted job."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cluster.errors import FleetError, PolyfleetError
from cluster.input.validation_errors import validate_model
from orchestrator.client import file_download, file_upload
from orchestrator.client.file_transfer import list_all_files
from orchestrator.client.server_connection import Bytes
from orchestrator.log_lines import join_lines
from orchestrator.show import jobs as show
from orchestrator.show.notebook_views import KeyValueView, TableView
from orchestrator.show.table import TableStack, facts
from orchestrator.spec import job_spec, job_spec_parts
from orchestrator.terminal_text import escape_control
from orchestrator.views.jobs import JobView

if TYPE_CHECKING:
    from orchestrator.client.client import Client

Data = dict[str, Any]


class Resources(job_spec_parts.ResourceSpec):
    """Devices that a job needs, e.g. `Resources(accelerators="nvidia:H100:8")`. Raises SpecError.

    Fields: `polyfleet schema job`.
    """

    def __init__(self, **fields: Any):
        validate_model(job_spec_parts.ResourceSpec, fields)
        super().__init__(**fields)


class Candidate(job_spec_parts.CandidateSpec):
    """One entry of `any_of` or `ordered`. Raises SpecError."""

    def __init__(self, **fields: Any):
        validate_model(job_spec_parts.CandidateSpec, fields)
        super().__init__(**fields)


class _Job(job_spec.JobSpec):
    """Fields as in a job's file: `polyfleet schema job`. Raises SpecError naming the field."""

    TASK: ClassVar[str]

    def __init__(self, **fields: Any):
        arguments = {"task": self.TASK, **fields}
        validate_model(job_spec.JobSpec, arguments)
        super().__init__(**arguments)


class TrainJob(_Job):
    """Runs `def train(ctx)` of `entry`, one rank per device: `TrainJob(entry="train.py", working_dir=".")`."""

    TASK = "train"


class PrepareJob(_Job):
    """Optimises the model that `entry` creates, checks it and saves it."""

    TASK = "prepare"


class BenchmarkJob(_Job):
    """Measures forward pass and training step of the model that `entry` creates."""

    TASK = "benchmark"


class RunJob(_Job):
    """Runs any command: `RunJob(command=["python", "x.py"], working_dir=".")`."""

    TASK = "run"


class JobFailed(PolyfleetError):
    """Raised by `result()` for a job that did not succeed: its state and, after a failure, the user's traceback."""

    def __init__(self, job: str, state: str, reason: str):
        super().__init__(f"{job} ended as {state}: {reason}", f"`polyfleet logs {job}` shows its output")
        self.args = (job, state, reason)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a log. `stream` is stdout or stderr, `attempt` its number. A line that was read before its end is
    `unfinished`; its rest is another LogLine of the same rank and stream, which has `continues`.
    """

    time: str
    attempt: int
    rank: int
    stream: str
    text: str
    continues: bool = False
    unfinished: bool = False


class Log(list[LogLine]):
    """Lines of a job's log. Printing it shows the text of the job, with control characters escaped, then the sentences
    of `away`: one for each part that is missing because its node does not respond.
    """

    away: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([*(escape_control(line.text) for line in self), *(f"… missing: {why}" for why in self.away)])

    __repr__ = __str__


class JobHandle:
    """A submitted job. Each access to an attribute queries the server."""

    def __init__(self, client: "Client", job_id: str):
        self._client = client
        self.id = job_id

    @property
    def view(self) -> KeyValueView:
        """All fields of the job: see `GET /v1/jobs/{ref}`."""
        return KeyValueView(self._client.jobs.show(self.id), show.job)

    @property
    def state(self) -> str:
        return str(self._client.jobs.show(self.id)["state"])

    @property
    def metrics(self) -> KeyValueView:
        """Values that the job's code reported last."""
        return KeyValueView(self._client.jobs.show(self.id)["metrics"], facts)

    def wait(self, timeout_s: float | None = None, on_update: Callable[[JobView], None] | None = None) -> "JobHandle":
        """Wait until the job has ended, successfully or not. Each view until then is passed to `on_update`. Raises
        FleetError after `timeout_s`; the job keeps running.
        """
        self._client.wait(self.id, timeout_s, on_update)
        return self

    def result(self, timeout_s: float | None = None) -> KeyValueView:
        """Wait for the job and return the result of its task. Raises JobFailed if it did not succeed."""
        view = self._client.wait(self.id, timeout_s)
        if view["state"] != "SUCCEEDED":
            failure: Mapping[str, Any] = view["failure"] or {}
            messages = [failure.get("message") or view["reason"], failure.get("traceback", "")]
            raise JobFailed(self.id, view["state"], "\n".join(filter(None, messages)))
        return KeyValueView(view["result"] or {}, lambda result: show.result(view["task"], result))

    def logs(self, *, rank: int | None = None, attempt: int | None = None, tail: int | None = None) -> Log:
        """Lines of the log so far. Raises FleetError if all of them are on nodes that do not respond."""
        page = self._client.jobs.logs(self.id, rank=rank, attempt=attempt, tail=tail)
        lines = page["lines"]
        while tail is None and page["lines"]:
            page = self._client.jobs.logs(self.id, rank=rank, attempt=attempt, cursor=page["cursor"])
            lines += page["lines"]
        if page["away"] and not lines and tail != 0:
            raise FleetError("; ".join(page["away"]))
        log = Log(LogLine(**line) for line in join_lines(lines))
        log.away = tuple(page["away"])
        return log

    def follow(self, *, rank: int | None = None, tail: int | None = None) -> Iterator[LogLine]:
        """Yield lines of the log as they arrive, until the job has ended."""
        for page in self._client.jobs.follow(self.id, rank=rank, tail=tail):
            yield from (LogLine(**line) for line in page["lines"])

    def reports(self) -> TableView:
        """Everything that the job's code passed to `ctx.report`, oldest first."""
        return TableView(self._client.jobs.reports(self.id), show.reports)

    def history(self) -> TableView:
        """All events of the job, oldest first."""
        return TableView(self._client.jobs.history(self.id), show.history)

    def explain(self, *changes: str) -> KeyValueView:
        """Explain for each candidate and each group of devices that it fits, or why not.

        With `changes` of the fleet, such as "+4 amd:MI300X" or "pool tpu down": the explanation for the changed fleet,
        and which other jobs the changes affect.
        """
        return KeyValueView(self._client.jobs.explain(self.id, changes=changes), show.plan)

    def files(self, path: str = "") -> KeyValueView:
        """Files that the job wrote to $POLYFLEET_OUTPUT_DIR: `entries`, each with path, type, bytes and modified_at."""
        return KeyValueView(list_all_files(self._client, self.id, path), show.files)

    def get(
        self, path: str = "", dest: str = "", *, force: bool = False, progress: Bytes | None = None
    ) -> KeyValueView:
        """Fetch a file or folder of the job to `dest` or the current folder. Conflict if a local file differs."""
        transfer = file_download.get(self._client, self.id, path, str(dest), force, progress)
        return KeyValueView(transfer.to_plain(), show.transferred)

    def put(self, source: str, path: str = "", *, force: bool = False, progress: Bytes | None = None) -> KeyValueView:
        """Copy a local file or folder to the job. Raises Conflict for a file of a running job, or one that differs."""
        transfer = file_upload.put(self._client, str(source), self.id, path, force, progress)
        return KeyValueView(transfer.to_plain(), show.transferred)

    def cancel(self) -> "JobHandle":
        self._client.jobs.cancel(self.id)
        return self

    def __str__(self) -> str:
        """The table of the job, as `polyfleet show` prints it. Raises what a request to the server raises."""
        return str(self.view)

    def __repr__(self) -> str:
        """The id alone: a debugger or a list of many jobs must not query the server."""
        return f"<job {self.id}>"

    def __rich__(self) -> TableStack:
        return show.job(self.view)

    def _repr_html_(self) -> str:
        return show.job(self.view).html()
