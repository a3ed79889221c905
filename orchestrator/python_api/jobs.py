"""Jobs from Python: `o.jobs`."""

from collections.abc import Iterator, Sequence
from typing import Any

from orchestrator.client.client import Client
from orchestrator.client.link import Rows
from orchestrator.show import jobs as show
from orchestrator.show.notebook_views import KeyValueView, TableView
from orchestrator.spec.job_spec import JobSpec
from orchestrator.submission import submission
from orchestrator.submission.jobs import JobHandle, Log, LogLine
from orchestrator.views.jobs import JobState

Data = dict[str, Any]


class Jobs:
    """Jobs of the server. `ref` is a job's id, a unique prefix of it, or a name: the newest job of that name."""

    def __init__(self, client: Client):
        self._client = client

    def submit(self, job: JobSpec | Data, *, key: str = "") -> JobHandle:
        """Submit a job; it is stored durably before this returns. Repeating a call with the same `key` returns the same
        job. A relative working_dir starts at the current folder.
        """
        return JobHandle(self._client, submission.submit(self._client, job, key)["id"])

    def submit_many(self, jobs: Sequence[JobSpec | Data], *, key: str = "") -> Rows[JobHandle]:
        """Submit all jobs or none, at most 1,000. A working folder that several jobs share is sent once."""
        return [JobHandle(self._client, job_id) for job_id in submission.submit_many(self._client, jobs, key)]

    def plan(self, job: JobSpec | Data) -> KeyValueView:
        """Describe what the scheduler would do with `job` now, without submitting it."""
        return KeyValueView(submission.plan(self._client, job), show.plan)

    def offers(self, job: JobSpec | Data) -> KeyValueView:
        """List where `job` could run now, with wait, speed and price, best first, without submitting it."""
        return KeyValueView(submission.offers(self._client, job), show.offers)

    def list(
        self, state: Sequence[JobState] | None = None, limit: int = 100, *, name: str = "", since: float = 0.0
    ) -> TableView:
        """The newest `limit` jobs, the newest last. `since`: only jobs submitted since this Unix time in seconds."""
        return TableView(self._client.jobs.list(state=state, limit=limit, name=name, since=since), show.jobs)

    def get(self, ref: str) -> JobHandle:
        """Return the handle of a job, which reads the job from the server at each access."""
        return JobHandle(self._client, self._client.jobs.show(ref)["id"])

    def show(self, ref: str) -> KeyValueView:
        """All fields of a job as they are now."""
        return KeyValueView(self._client.jobs.show(ref), show.job)

    def cancel(self, ref: str, *, key: str = "") -> JobHandle:
        """Cancel a job. A job that has ended is not changed."""
        return JobHandle(self._client, self._client.jobs.cancel(ref, key=key)["id"])

    def migrate(self, ref: str, to: str, *, key: str = "") -> JobHandle:
        """Move a job to a pool, a kind or a back end. It saves, stops and continues there from its newest checkpoint,
        or starts again if it has none; `view["continues"]` says which.
        """
        return JobHandle(self._client, self._client.jobs.migrate(ref, to, key=key)["id"])

    def rename(self, ref: str, name: str, *, key: str = "") -> JobHandle:
        """Give a job another name. A job that has ended keeps its own."""
        return JobHandle(self._client, self._client.jobs.rename(ref, name, key=key)["id"])

    def explain(self, ref: str, *changes: str) -> KeyValueView:
        """Explain where a job can run and why not elsewhere. `changes` of the fleet are as for `JobHandle.explain`."""
        return self.get(ref).explain(*changes)

    def history(self, ref: str) -> TableView:
        """All events of a job, oldest first."""
        return self.get(ref).history()

    def logs(self, ref: str, *, rank: int | None = None, attempt: int | None = None, tail: int | None = None) -> Log:
        """Lines of a job's log so far. Raises FleetError if all of them are on nodes that do not respond."""
        return self.get(ref).logs(rank=rank, attempt=attempt, tail=tail)

    def follow(self, ref: str, *, rank: int | None = None, tail: int | None = None) -> Iterator[LogLine]:
        """Yield lines of a job's log as they arrive, until the job has ended."""
        return self.get(ref).follow(rank=rank, tail=tail)
