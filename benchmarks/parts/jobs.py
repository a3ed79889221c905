"""Jobs that do nothing, through the server, timed as a client sees them; the stages between from the job's history."""

import time
from datetime import datetime
from time import perf_counter
from types import TracebackType

from parts.samples import Samples

from orchestrator import Orchestrator, RunJob
from orchestrator.client import client as server

NO_OP = {"name": "no-op", "task": "run", "command": ["echo", "hello"]}
PATIENCE_S = 60.0


class Jobs:
    """`events` counts each job's events: every one is on disk before anything follows from it."""

    def __init__(self, samples: Samples):
        self.samples = samples
        self.events: list[int] = []
        self._client, self._orchestrator = server.connect(), Orchestrator.connect()
        self._seen = 0

    def __enter__(self) -> "Jobs":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()
        self._orchestrator.close()

    def one(self, case: str) -> None:
        """Its stages too, which do not include asking for them."""
        began, start = time.time(), perf_counter()
        job = self._client.jobs.submit(NO_OP)["id"]
        self.samples.add(f"{case}.acknowledged", perf_counter() - start)
        self.until_finished({job})
        done_s = perf_counter() - start
        self.samples.add(f"{case}.done", done_s)
        self._stages(case, job, began, done_s)

    def wait(self) -> None:
        """The same from Python, as the README shows it."""
        with self.samples.timing("job.python"):
            self._orchestrator.submit(RunJob(name=NO_OP["name"], command=NO_OP["command"])).wait()

    def back_to_back(self) -> None:
        """The job before it has ended a moment ago and holds the only device until Ray has it back."""
        with self.samples.timing("job.back_to_back"):
            self.until_finished({self._client.jobs.submit(NO_OP)["id"]})

    def queued(self, jobs: int) -> None:
        """Submitted at once, for one device: seconds per job."""
        start = perf_counter()
        self.until_finished({self._client.jobs.submit(NO_OP)["id"] for _ in range(jobs)})
        self.samples.add("job.queued", (perf_counter() - start) / jobs)

    def until_finished(self, waited_for: set[str], pause_s: float = 0.0) -> None:
        """Told by the server's change feed, without polling; it is asked again after `pause_s`."""
        deadline = time.monotonic() + PATIENCE_S
        waiting = set(waited_for)
        while waiting:
            changes = self._client.changes.wait(after=self._seen)
            self._seen = changes["last"]
            ended = {event["job"]: event for event in changes["events"] if event["event"] in ("finished", "failed")}
            waiting -= set(ended)
            time.sleep(pause_s if waiting else 0.0)
            broken = [job for job, event in ended.items() if event["event"] == "failed"]
            if broken or time.monotonic() > deadline:
                raise SystemExit(f"no-op jobs: failed {broken}, not ended {waiting}")

    def _stages(self, case: str, job: str, began: float, done_s: float) -> None:
        """Times of the history and of the log are of this machine's clock, as `began` is."""
        history = self._client.jobs.history(job)
        at = {event["event"]: _wall_s(event["occurred_at"]) for event in history}
        first_line = self._client.jobs.logs(job)["lines"][0]["time"]
        printed = _wall_s(first_line)
        marks = [began, at["submitted"], at["placed"], printed, at["finished"], began + done_s]
        names = ("accepted", "placed", "command_ran", "finished", "told")
        for name, earlier, later in zip(names, marks, marks[1:], strict=False):
            self.samples.add(f"{case}.stage.{name}", max(later - earlier, 0.0))
        self.samples.add(f"{case}.running", printed - began)
        self.events.append(len(history))


def _wall_s(iso: str) -> float:
    return datetime.fromisoformat(iso).timestamp()
