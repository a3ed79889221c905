"""Fold the event log into the present state of every job. Deterministic: equal logs give equal states.

| event       | changes state | its data                                                                              |
|-------------|---------------|---------------------------------------------------------------------------------------|
| submitted   | to PENDING    | job (as plain data), spec, package                                                    |
| placed      | yes           | candidate, kind, pool, leases [[devices id, [numbers]]], launch, reason; a new epoch   |
| started     | yes           |                                                                                       |
| preempted   | yes           | reason for the request to the attempt to save and stop                                |
| finished    | yes           | reason, result                                                                        |
| failed      | yes           | reason, failure, result                                                               |
| interrupted | yes           | as failed, and what retry.py decided: restarts, interruptions, refusals, and so on    |
| refused     | yes           | reason why no device can ever run it                                                  |
| cancelled   | yes           | reason; its attempt keeps its devices until `released`                                |
| released    | no            | outcome, reason: all processes of the attempt have ended, its devices are free        |
| checkpoint  | no            | pool, path, step, node, at (position among the events of its rank)                    |
| replicated  | no            | pool, path, step, node of a new copy of that checkpoint                               |
| unreplicated| no            | step, reason: why there is no copy of it                                              |
| resumed     | no            | step, source; missed, missed_files, script: sentences (see Record)                    |
| migrated    | no            | candidates that replace the job's own, reason                                         |
| renamed     | no            | name                                                                                  |
| overtaken   | no            | node, seen: the epoch of an attempt there that is newer than all in this log          |

Fencing: an event of an attempt counts only with the job's current epoch, and `placed` only with the next one. Events
from users (submit, cancel, migrate, rename) are never fenced, nor is `overtaken`, which raises the next epoch. An event
that does not count is ignored; `ignored_reason` returns the reason.

Events of a node, `drained` and `undrained`, have "node/NAME" in place of a job id: see core/controller/nodes.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from cluster.serialization import from_plain, to_json, to_plain
from orchestrator.core.jobs.retry import Decision
from orchestrator.core.model import HIGHEST, Candidate, Event, Job, Running, Start
from orchestrator.core.states import MOVES, TERMINAL, State

WORKING = frozenset({State.STARTING, State.RUNNING})
RESUMED = ("missed", "missed_files", "script", "source")
NOTES = frozenset(
    {"released", "checkpoint", "replicated", "unreplicated", "resumed", "migrated", "renamed", "overtaken"}
)
COPY_NOTES = frozenset({"replicated", "unreplicated"})
"""Notes that also count after the job has ended."""
UNFENCED = frozenset({"cancelled", "migrated", "renamed", "overtaken"})
ENDINGS = {"finished": "succeeded", "failed": "failed", "interrupted": "interrupted", "released": "released"}


@dataclass(frozen=True, slots=True)
class Attempt:
    """One placement of a job. It holds its devices (`allocation`) until `ended_s` is set.

    `candidate` is a position in the job's candidates when it was placed; `former_candidate` is that candidate if a
    migration has replaced them since (see Record.candidate_of). `outcome` is a value of ENDINGS or more specific.
    `aged` is the priority that its job had gained by waiting. `peak_memory_bytes` is that of the node that used most,
    0 if it was not measured.
    """

    epoch: int
    candidate: int
    kind: str
    pool: str
    allocation: tuple[tuple[str, tuple[int, ...]], ...]
    placed_s: float
    started_s: float | None = None
    ended_s: float | None = None
    outcome: str = ""
    reason: str = ""
    peak_memory_bytes: int = 0
    aged: int = 0
    former_candidate: Candidate | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """Complete state of a job, except the text that its user wrote, which is in the event `submitted`.

    `reason` belongs to the event that led to its state, `seq` to the last event that counted. `missed` says why it did
    not resume from its newest checkpoint, `missed_files` which of its files were missing, `script` what was done with a
    checkpoint of its own script. `source` is the POOL:PATH of the checkpoint of `resumed_step`. `replicas` are the
    newest copies of its checkpoints, one per node (pool, path, step, node); `unreplicated` is why the newest has none.
    """

    job: Job
    reason: str = ""
    attempts: tuple[Attempt, ...] = ()
    checkpoint: dict[str, Any] | None = None
    resumed_step: int | None = None
    missed: str = ""
    script: str = ""
    missed_files: str = ""
    source: str = ""
    replicas: tuple[dict[str, Any], ...] = ()
    unreplicated: str = ""
    result: dict[str, Any] | None = None
    failure: dict[str, Any] | None = None
    started_s: float | None = None
    ended_s: float | None = None
    seq: int = 0

    @property
    def live_attempt(self) -> Attempt | None:
        """Attempt that holds devices, or None. A cancelled job has one until it is released."""
        last = self.attempts[-1] if self.attempts else None
        return last if last and last.ended_s is None else None

    def candidate_of(self, attempt: Attempt) -> Candidate:
        """Return the candidate that an attempt of this job was placed as, also after a migration."""
        return attempt.former_candidate or self.job.candidates[attempt.candidate]

    @property
    def may_start(self) -> bool:
        """Return True if `started` of its newest attempt may follow, also after a request to save and stop: ranks that
        ran until then have written files, with which the next attempt continues.
        """
        last = self.live_attempt
        return self.job.state in (State.STARTING, State.SAVING) and last is not None and last.started_s is None

    @property
    def needs_copies(self) -> bool:
        """Return True if its newest checkpoint has fewer copies on other machines than the job requests."""
        if not self.job.replicas or self.checkpoint is None or not self.checkpoint.get("node"):
            return False
        copies = [replica for replica in self.replicas if replica["step"] == self.checkpoint["step"]]
        return len(copies) < self.job.replicas


def fold(events: Iterable[Event]) -> dict[str, Record]:
    """Return the records by job id, in the order of submission."""
    records: dict[str, Record] = {}
    for event in events:
        if record := apply(records.get(event.job), event):
            records[event.job] = record
    return records


def apply(record: Record | None, event: Event) -> Record | None:
    """Return the record after `event`; the same object if the event is ignored."""
    if ignored_reason(record, event):
        return record
    if record is None:
        return _submitted(event)
    updated = replace(record, seq=event.seq)
    if event.event in NOTES:
        return _noted(updated, event)
    return _moved(updated, event)


def ignored_reason(record: Record | None, event: Event) -> str:
    """Return why `event` is ignored, "" if it counts."""
    if record is None:
        return "" if event.event == "submitted" else f"no job {event.job} was submitted"
    if event.event == "submitted":
        return f"{event.job} is already submitted"
    job = record.job
    expected = job.next_epoch if event.event == "placed" else job.epoch
    if event.event not in UNFENCED and event.epoch != expected:
        return f"event {event.event} is of attempt {event.epoch}, but the job is at attempt {expected}"
    if event.event == "released":
        return "" if record.live_attempt else "nothing is left to release"
    if event.event in NOTES:
        return f"the job is {job.state}" if job.state in TERMINAL and event.event not in COPY_NOTES else ""
    return "" if (job.state, event.event) in MOVES else f"a job in {job.state} has no move for {event.event}"


def running(records: Iterable[Record]) -> tuple[Running, ...]:
    """Return the live attempts for a snapshot. `order` is that of submission, also among equal priorities."""
    return tuple(_running(record, record.live_attempt) for record in records if record.live_attempt)


def _running(record: Record, attempt: Attempt) -> Running:
    job = record.job
    return Running(
        job.id,
        min(HIGHEST, job.priority + attempt.aged),
        job.number,
        attempt.allocation,
        preemptible=job.preemptible,
        stopping=job.state not in WORKING,
        spec=job,
        candidate=attempt.candidate,
        former_candidate=attempt.former_candidate,
        saves=record.checkpoint is not None,
    )


def submitted(job: Job, spec: dict[str, Any], now_s: float) -> Event:
    return Event(job.id, "submitted", 0, now_s, {"job": to_json(job), "spec": spec})


def placed(job: Job, start: Start, kind: str, pool: str, now_s: float) -> Event:
    """Return the event that makes `start` the job's next attempt."""
    allocation = [[devices_id, list(numbers)] for devices_id, numbers in start.allocation]
    data = {"candidate": start.candidate, "kind": kind, "pool": pool, "leases": allocation, "reason": start.reason}
    if start.aged:
        data["aged"] = start.aged
    return Event(job.id, "placed", job.next_epoch, now_s, data)


def ended(job: Job, decision: Decision, now_s: float, **data: Any) -> Event:
    """Return the event for a decision of retry.py. `data` may have outcome, result, failure and peak_memory_bytes."""
    data_of_decision = to_plain(decision)
    return Event(job.id, data_of_decision.pop("event"), job.epoch, now_s, data_of_decision | data)


def _submitted(event: Event) -> Record:
    job = from_plain(Job, {**event.data["job"], "number": event.seq})
    return Record(job, "submitted", seq=event.seq)


def _noted(record: Record, event: Event) -> Record:
    if event.event == "checkpoint":
        return replace(record, checkpoint=dict(event.data))
    if event.event == "replicated":
        others = (r for r in record.replicas if r["node"] != event.data["node"])
        return replace(record, replicas=(*others, dict(event.data)), unreplicated="")
    if event.event == "unreplicated":
        return replace(record, unreplicated=str(event.data["reason"]))
    if event.event == "resumed":
        fields: dict[str, Any] = {name: event.data.get(name, "") for name in RESUMED}
        return replace(record, resumed_step=event.data["step"], **fields)
    if event.event == "migrated":
        return _with_candidates(record, tuple(from_plain(Candidate, c) for c in event.data["candidates"]))
    if event.event == "renamed":
        return replace(record, job=replace(record.job, name=event.data["name"]))
    if event.event == "overtaken":
        floor = max(record.job.floor, int(event.data["seen"]))
        return replace(record, job=replace(record.job, floor=floor, overtaken=True))
    return _attempt_ended(record, event)


def _with_candidates(record: Record, candidates: tuple[Candidate, ...]) -> Record:
    """Replace the candidates of the job; its attempts keep those that they were placed as."""
    attempts = tuple(replace(a, former_candidate=record.candidate_of(a)) for a in record.attempts)
    job = replace(record.job, candidates=candidates, first_candidate=0)
    return replace(record, job=job, attempts=attempts)


def _moved(record: Record, event: Event) -> Record:
    state = MOVES[record.job.state, event.event]
    reason = event.data.get("reason", record.reason if state is record.job.state else "")
    updated = replace(record, job=replace(record.job, state=state), reason=reason)
    updated = UPDATES.get(event.event, lambda same, _: same)(updated, event)
    return replace(updated, ended_s=event.time_s) if state in TERMINAL else updated


def _placed(record: Record, event: Event) -> Record:
    data = event.data
    allocation = tuple((devices_id, tuple(numbers)) for devices_id, numbers in data["leases"])
    placement = data["candidate"], data["kind"], data["pool"]
    attempt = Attempt(event.epoch, *placement, allocation, event.time_s, aged=data.get("aged", 0))
    job = replace(record.job, epoch=event.epoch, backend=data["kind"].partition(":")[0])
    return replace(record, job=job, attempts=(*record.attempts, attempt))


def _started(record: Record, event: Event) -> Record:
    first_s = event.time_s if record.started_s is None else record.started_s
    updated = replace(_last(record, started_s=event.time_s), started_s=first_s)
    # It stays guarded while its attempt is older than one that may run elsewhere.
    is_guarded = updated.job.overtaken and updated.job.epoch <= updated.job.floor
    return replace(updated, job=replace(updated.job, overtaken=is_guarded))


def _attempt_ended(record: Record, event: Event) -> Record:
    data = event.data
    names = ("restarts", "interruptions", "refusals", "first_candidate")
    job = replace(record.job, **{name: data[name] for name in names if name in data})
    job = replace(job, avoid=tuple(data.get("avoid", ())))
    outcome = data.get("outcome") or ENDINGS[event.event]
    details = {"reason": data.get("reason", ""), "peak_memory_bytes": data.get("peak_memory_bytes", 0)}
    updated = _last(record, ended_s=event.time_s, outcome=outcome, **details)
    failure = None if event.event == "finished" else data.get("failure") or updated.failure
    return replace(updated, job=job, result=data.get("result") or updated.result, failure=failure)


def _last(record: Record, **changes: Any) -> Record:
    """Return `record` with its last attempt changed. A job that was refused before any placement has none."""
    if not record.attempts:
        return record
    return replace(record, attempts=(*record.attempts[:-1], replace(record.attempts[-1], **changes)))


UPDATES = {
    "placed": _placed,
    "started": _started,
    "finished": _attempt_ended,
    "failed": _attempt_ended,
    "interrupted": _attempt_ended,
}
