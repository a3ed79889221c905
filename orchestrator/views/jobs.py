"""Jobs, their attempts, events and metrics."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from orchestrator.views.values import AllocationView, JsonObject, Scalar, StreamEvents

JobState = Literal["PENDING", "STARTING", "RUNNING", "SAVING", "RECOVERING", "SUCCEEDED", "FAILED", "CANCELLED"]
TaskName = Literal["prepare", "train", "benchmark", "run"]


class CheckpointRef(TypedDict):
    """A checkpoint in a pool's storage, as in the job's event."""

    pool: str
    path: str
    """Path in the pool's storage."""
    step: int
    node: NotRequired[str]
    """The node that wrote it. Events of early versions lack it, and `at`."""
    at: NotRequired[int]
    """Position of the event among those of its rank, in bytes."""
    bytes: NotRequired[int]
    seconds: NotRequired[float]
    """Time of saving, in seconds."""
    blocked_s: NotRequired[float]
    """Time for which saving stopped the training, in seconds."""


class ReplicaView(TypedDict):
    """A copy of a job's checkpoint on another machine."""

    pool: str
    path: str
    step: int
    node: str


class FailureView(TypedDict):
    """Why an attempt failed."""

    rank: int
    node: str
    kind: str
    """Kind of failure, such as user, oom or hang: docs/reference/failures.md lists them."""
    message: str
    traceback: str
    """Frames of the user's own code, or empty."""
    exit_code: int | None


class ProgressView(TypedDict):
    """Progress of an open job that was placed at least once."""

    step: int
    of: int | None
    """Number of all steps, if it was declared or reported."""
    steps_per_s: float | None
    """Measured rate on its present devices, if there is one."""
    left_s: float
    """Estimated remaining time on its last devices, in seconds."""
    left_from: Literal["declared", "reported", "history", "attained"]
    """Source of the estimate."""
    left: str
    """Remaining time and source as a sentence."""


class AttemptView(TypedDict):
    """One placement of a job. Times are ISO 8601 in UTC."""

    attempt: int
    """Number of the attempt, from 1."""
    candidate: int
    """Number of the candidate that was placed, from 1."""
    kind: str
    pool: str
    allocations: list[AllocationView]
    """One for each node, by rank."""
    placed_at: str | None
    started_at: str | None
    ended_at: str | None
    outcome: str
    """How it ended, such as succeeded, failed or preempted; empty while it holds its devices."""
    reason: str
    peak_memory_bytes: int | None
    """Peak memory of the node that used most, if it was measured."""


class JobView(TypedDict):
    """A job with its attempts. Times are ISO 8601 in UTC. `kind`, `pool` and `nodes` are those of its last attempt.

    A list that was requested with `fields` has only these fields and `id`.
    """

    id: str
    name: str
    task: TaskName
    state: JobState
    reason: str
    """Why it is in this state, or what it waits for."""
    priority: int
    kind: str
    pool: str
    nodes: list[str]
    attempt: int
    """Number of its last attempt, 0 before the first."""
    candidate: int | None
    """Number of the candidate of its last attempt, from 1."""
    submitted_at: str | None
    started_at: str | None
    ended_at: str | None
    known_until: str | None
    """Last contact with its nodes, while they do not respond."""
    restarts: int
    """Restarts after failures of its own."""
    interruptions: int
    """Attempts that ended for another reason, such as a lost node."""
    resumed_step: int | None
    """Step from which its last attempt resumed."""
    resumed_from: str
    """POOL:PATH of the checkpoint of `resumed_step`."""
    continues: str
    """What its next attempt would resume from, as a clause; empty if it has not started or has ended."""
    missed_checkpoint: str
    """Why it did not resume from its newest checkpoint."""
    script_checkpoint: str
    """What was done with a checkpoint of its own script."""
    missed_files: str
    """Which of its files were missing at its last start, and why."""
    checkpoint: CheckpointRef | None
    """Its newest checkpoint."""
    replicas: list[ReplicaView]
    """The newest copies of its checkpoints, one for each node."""
    unreplicated: str
    """Why its newest checkpoint has no copy."""
    progress: ProgressView | None
    metrics: dict[str, Scalar]
    """The newest values that its code reported."""
    result: JsonObject | None
    """What its task returned."""
    failure: FailureView | None
    attempts: list[AttemptView]


class AcceptedJob(TypedDict):
    """An accepted job of a bulk submission."""

    id: str
    name: str


class AcceptedView(TypedDict):
    """Accepted jobs, in the order of the request."""

    jobs: list[AcceptedJob]
    note: str
    """Why they wait, if no fleet is up."""


class StoryStepView(TypedDict):
    """What the server did about a job after one message, such as a reply of a node."""

    number: int
    """Number of the message since the server started; 0 for a note about the server itself."""
    handled_at: str
    """When the message was handled, as ISO 8601 in UTC."""
    message: str
    changes: list[str]
    """Changed states of its attempts, then commands. The reply to a command names the number of the command."""


class JobStoryView(TypedDict):
    """Events of a job, and the messages after which the server changed its attempts or sent commands."""

    job: str
    """Id of the job."""
    events: "list[JobEvent]"
    """All events of the job, oldest first."""
    steps: list[StoryStepView]
    """Oldest first, from the newest 10,000 lines about all jobs since the server started."""


class JobEvent(TypedDict):
    """An event of a job, or of a node."""

    seq: int
    """Number of the event, increasing over all jobs."""
    occurred_at: str
    """ISO 8601 in UTC."""
    job: str
    """Id of the job; `node/NAME` for an event of a node."""
    event: str
    attempt: int
    """Number of the attempt that it belongs to."""
    state: JobState | Literal[""]
    """State of the job now, not at the event; empty for a node."""
    data: JsonObject
    """Depends on the event; its `candidate` counts from 1."""


class ChangesPage(TypedDict):
    """Events of all jobs after a number."""

    events: list[JobEvent]
    last: int
    """Continue after this number; it may be higher than that of the last event."""


class ChangeEvents(StreamEvents, total=False):
    """Events of `GET /v1/changes/stream`."""

    change: JobEvent


class ReportView(TypedDict):
    """Values that a job's code reported for one step."""

    seq: int
    """Number of the report, increasing over all jobs."""
    attempt: int
    step: int
    of: int | None
    """Number of all steps, if it was reported."""
    reported_at: str | None
    """ISO 8601 in UTC; null if its time is not valid."""
    metrics: dict[str, Scalar]
