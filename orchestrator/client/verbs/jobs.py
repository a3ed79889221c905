"""Verbs of `jobs`, written by docs/generate.py. Change orchestrator/verbs/jobs.py instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.client.link import Link, Rows
    from orchestrator.views.jobs import AcceptedView, JobEvent, JobState, JobStoryView, JobView, ReportView
    from orchestrator.views.logs import LogEvent, LogPageView
    from orchestrator.views.plans import ExplanationView, JobExplanation, OffersView
    from orchestrator.views.values import JsonObject


class Jobs:
    def __init__(self, link: Link):
        self._link = link

    def submit(self, spec: JsonObject, *, code_archive: str = "", key: str = "") -> JobView:
        """Submit a job; it is durable when this responds. The same key with the same body returns the same response.

        If no fleet is up, the job is checked against the last reported devices, and its `reason` says that it
        waits.

        - `code_archive`: SHA-256 of an uploaded code archive, or empty
        - `key`: idempotency key: a repeated call with the same key and arguments counts once
        """
        result: JobView = self._link.once("POST", "/v1/jobs", {}, {"spec": spec, "code_archive": code_archive}, key=key)
        return result

    def submit_many(self, jobs: Sequence[JsonObject], *, key: str = "") -> AcceptedView:
        """Submit up to 1,000 jobs, all or none. The response has them in the order of the request.

        - `jobs`: jobs, each as for `POST /v1/jobs`
        - `key`: idempotency key: a repeated call with the same key and arguments counts once
        """
        result: AcceptedView = self._link.once("POST", "/v1/jobs/bulk", {}, {"jobs": jobs}, key=key)
        return result

    def plan(self, spec: JsonObject, *, content_sha: str = "") -> ExplanationView:
        """What the planner would do with this spec now: for each candidate, which devices fit and why others do not.
        Stores nothing. The folder need not be uploaded: measurements of it are looked up by its `content_sha`.

        - `content_sha`: SHA-256 of the folder's content, or empty
        """
        result: ExplanationView = self._link.plain("POST", "/v1/plan", {}, {"spec": spec, "content_sha": content_sha})
        return result

    def offers(self, spec: JsonObject, *, content_sha: str = "") -> OffersView:
        """Where this spec could run now: wait, speed and price for each candidate, pool and kind, best first.

        Stores nothing. The folder need not be uploaded: measurements of it are looked up by its `content_sha`.

        - `content_sha`: SHA-256 of the folder's content, or empty
        """
        result: OffersView = self._link.plain("POST", "/v1/offers", {}, {"spec": spec, "content_sha": content_sha})
        return result

    def list(
        self,
        *,
        state: Sequence[JobState] | None = None,
        name: str = "",
        since: float = 0.0,
        before: int | None = None,
        limit: int = 100,
        fields: str = "",
    ) -> Rows[JobView]:
        """The newest jobs, the newest last. If there are older ones, `Link: <...>; rel="next"` is their page.

        - `state`: only jobs in these states
        - `name`: only jobs of this name
        - `since`: only jobs submitted at or after this Unix time, seconds
        - `before`: continue after the previous page: see `Link`
        - `limit`: maximum number of jobs
        - `fields`: comma-separated fields of each job (default: all)
        """
        result: Rows[JobView] = self._link.plain(
            "GET",
            "/v1/jobs",
            {"state": state, "name": name, "since": since, "before": before, "limit": limit, "fields": fields},
        )
        return result

    def list_pages(
        self,
        *,
        state: Sequence[JobState] | None = None,
        name: str = "",
        since: float = 0.0,
        before: int | None = None,
        limit: int = 100,
        fields: str = "",
    ) -> Iterator[Rows[JobView]]:
        """The newest jobs, the newest last. If there are older ones, `Link: <...>; rel="next"` is their page.

        - `state`: only jobs in these states
        - `name`: only jobs of this name
        - `since`: only jobs submitted at or after this Unix time, seconds
        - `before`: continue after the previous page: see `Link`
        - `limit`: maximum number of jobs
        - `fields`: comma-separated fields of each job (default: all)
        """
        result: Iterator[Rows[JobView]] = self._link.pages(
            "/v1/jobs",
            {"state": state, "name": name, "since": since, "before": before, "limit": limit, "fields": fields},
        )
        return result

    def show(self, ref: str) -> JobView:
        """One job with all its attempts.

        - `ref`: job id, unique id prefix, or job name (the newest of that name)
        """
        result: JobView = self._link.plain("GET", "/v1/jobs/{ref}", {"ref": ref})
        return result

    def cancel(self, ref: str, *, key: str = "") -> JobView:
        """Cancel a job. A job that has ended is not changed.

        - `ref`: job id, unique id prefix, or job name (the newest of that name)
        - `key`: idempotency key: a repeated call with the same key and arguments counts once
        """
        result: JobView = self._link.plain("POST", "/v1/jobs/{ref}/cancel", {"ref": ref}, key=key)
        return result

    def migrate(self, ref: str, to: str, *, key: str = "") -> JobView:
        """Move a job to other devices: it saves a checkpoint, stops, and continues there from its checkpoint.

        - `ref`: job id, unique id prefix, or job name (the newest of that name)
        - `to`: a pool, a kind such as `tpu:v5e`, or a back end
        - `key`: idempotency key: a repeated call with the same key and arguments counts once
        """
        result: JobView = self._link.plain("POST", "/v1/jobs/{ref}/migrate", {"ref": ref}, {"to": to}, key=key)
        return result

    def rename(self, ref: str, name: str, *, key: str = "") -> JobView:
        """Give a job another name. A job that has ended keeps its own.

        - `ref`: job id, unique id prefix, or job name (the newest of that name)
        - `name`: new name, written as `name` in a job file
        - `key`: idempotency key: a repeated call with the same key and arguments counts once
        """
        result: JobView = self._link.plain("POST", "/v1/jobs/{ref}/rename", {"ref": ref}, {"name": name}, key=key)
        return result

    def explain(self, ref: str, *, changes: Sequence[str] = ()) -> JobExplanation:
        """Explain where a job can run: for each candidate and group of devices, that it fits or why not. With `if`:
        for the fleet with these changes.

        - `ref`: job id, unique id prefix, or job name (the newest of that name)
        - `changes`: changes of the fleet: `+4 amd:MI300X`, `pool tpu down`, `node a up`
        """
        result: JobExplanation = self._link.plain("GET", "/v1/jobs/{ref}/explain", {"ref": ref, "if": changes})
        return result

    def history(self, ref: str) -> Rows[JobEvent]:
        """All events of the job, oldest first.

        - `ref`: job id, unique id prefix, or job name (the newest of that name)
        """
        result: Rows[JobEvent] = self._link.plain("GET", "/v1/jobs/{ref}/history", {"ref": ref})
        return result

    def story(self, ref: str) -> JobStoryView:
        """The stored events of a job, and the steps that led to its present state. A step is a message to the server
        with the changes of the job's attempts and the commands that followed from it. The server has the newest
        10,000 lines of steps of all jobs in memory.

        - `ref`: job id, unique id prefix, or job name (the newest of that name)
        """
        result: JobStoryView = self._link.plain("GET", "/v1/jobs/{ref}/story", {"ref": ref})
        return result

    def reports(self, ref: str, *, after: int = 0) -> Rows[ReportView]:
        """Values that the job's code reported with `ctx.report`, after number `after`.

        - `ref`: job id, unique id prefix, or job name (the newest of that name)
        """
        result: Rows[ReportView] = self._link.plain("GET", "/v1/jobs/{ref}/reports", {"ref": ref, "after": after})
        return result

    def logs(
        self,
        ref: str,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        tail: int | None = None,
        cursor: Mapping[str, Any] | None = None,
    ) -> LogPageView:
        """Lines of a log that exist now: a page from `cursor` on, or the last `tail` lines. `ended`: no more will
        follow.

        `job` is the job's id: use it for the next page, since a name means the newest job with it. `away`: a
        sentence for each node whose lines are missing because it did not respond; with `tail`, only for attempts
        that are needed for that number of lines. A line that was read before its end has `unfinished`; its rest
        is another line of the same rank and stream, which has `continues`.

        - `ref`: job id, unique id prefix, or job name (the newest of that name)
        - `rank`: only this rank
        - `attempt`: only this attempt; by default all
        - `tail`: only this number of lines from the end of the log, regardless of `cursor`
        - `cursor`: `cursor` of the previous page, as JSON
        """
        result: LogPageView = self._link.plain(
            "GET", "/v1/jobs/{ref}/logs", {"ref": ref, "rank": rank, "attempt": attempt, "tail": tail, "cursor": cursor}
        )
        return result

    def follow(
        self,
        ref: str,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        tail: int | None = None,
        cursor: Mapping[str, Any] | None = None,
    ) -> Iterator[LogEvent]:
        """Stream a log: server-sent events `log` as lines arrive, and `end` when the job has ended.

        The first `log` may have no lines. To reconnect to the same log, use its job id and the last cursor.

        - `ref`: job id, unique id prefix, or job name (the newest of that name)
        - `rank`: only this rank
        - `attempt`: only this attempt; by default all
        - `tail`: only this number of lines from the end of the log, regardless of `cursor`
        - `cursor`: `cursor` of the previous page, as JSON
        """
        result: Iterator[LogEvent] = self._link.follow(
            "/v1/jobs/{ref}/logs/stream",
            {"ref": ref, "rank": rank, "attempt": attempt, "tail": tail, "cursor": cursor},
            {"ref": "job", "cursor": "cursor", "tail": ""},
        )
        return result
