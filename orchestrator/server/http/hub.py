"""What the routes of one server share: the service, its streams and operations, and facts of the process."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from orchestrator.server.http.batching import Batcher
from orchestrator.server.http.exec_streams import ExecThreads
from orchestrator.server.http.operations import LongOperations
from orchestrator.server.http.streams import Streams
from orchestrator.services.service import Service
from orchestrator.services.submissions import Submission
from orchestrator.views.jobs import JobView


@dataclass
class Hub:
    """First parameter of every verb. `prove` computes the response to a challenge of `GET /healthz` on a port. `stop`
    ends the server. What belongs to the event loop is created at its first use there.
    """

    service: Service
    home: Path
    started_at: str
    prove: Callable[[int | None, str], str]
    stop: Callable[[], None]

    @cached_property
    def streams(self) -> Streams:
        return Streams(self.service)

    @cached_property
    def operations(self) -> LongOperations:
        return LongOperations(self.service)

    @cached_property
    def execs(self) -> ExecThreads:
        return ExecThreads(self.service)

    @cached_property
    def submissions(self) -> Batcher[Submission, JobView]:
        return Batcher(self.service.submissions.submit_each)
