"""Operations of the service for logs of jobs, and for commands run beside a job (`exec`)."""

from typing import Any

from orchestrator.core.jobs.fold import Record
from orchestrator.runtime.health.fleet_ready import FleetReadiness
from orchestrator.runtime.jobs.exec_relay import ExecRelay, ExecRequest
from orchestrator.runtime.jobs.jobs import Jobs
from orchestrator.runtime.jobs.logs import JobLogs


class LogVerbs:
    """Log and exec methods of Service."""

    jobs_table: Jobs
    readiness: FleetReadiness
    job_logs: JobLogs
    exec_relay: ExecRelay

    def logs(
        self, ref: str, rank: int | None, epoch: int | None, cursor: dict[str, int], limit_bytes: int
    ) -> dict[str, Any]:
        return self.job_logs.read(self._find_run_job(ref), rank, epoch, cursor, limit_bytes)

    def logs_tail(self, ref: str, rank: int | None, epoch: int | None, count: int) -> dict[str, Any]:
        return self.job_logs.tail(self._find_run_job(ref), rank, epoch, count)

    def logs_away(self, ref: str, rank: int | None, epoch: int | None, first: int) -> list[str]:
        return self.job_logs.unread_notes(self._find_run_job(ref), rank, epoch, first)

    def _find_run_job(self, ref: str) -> Record:
        """Find a job; if it has run, wait first until the fleet's nodes have reported."""
        record = self.jobs_table.find(ref)
        if record.attempts:
            self.readiness.wait_until_ready()
        return record

    def exec_start(self, ref: str, request: ExecRequest) -> dict[str, Any]:
        """Run a command beside a rank of a running job: {"exec", "job", "attempt", "rank", "node"}."""
        return self.exec_relay.start(self._find_run_job(ref), request)

    def exec_read(self, exec_id: str, cursor: int, timeout_s: float) -> dict[str, Any]:
        return self.exec_relay.read(exec_id, cursor, timeout_s)

    def exec_write(self, exec_id: str, offset: int, data: bytes, end: bool) -> dict[str, Any]:
        return self.exec_relay.write(exec_id, offset, data, end)

    def exec_resize(self, exec_id: str, rows: int, columns: int) -> None:
        self.exec_relay.resize(exec_id, rows, columns)

    def exec_close(self, exec_id: str) -> None:
        self.exec_relay.close(exec_id)
