"""What the ranks of a job printed, read from the nodes they ran on."""

from typing import Any

from cluster.errors import FleetError, NotFound
from orchestrator.core.fold import Attempt, Record
from orchestrator.core.states import TERMINAL
from orchestrator.runtime.agents import Agents
from orchestrator.runtime.live import node_of
from orchestrator.runtime.orders import ranks_of

STREAMS = {"out": "stdout", "err": "stderr"}


class Logs:
    def __init__(self, agents: Agents):
        self._agents = agents

    def read(
        self, record: Record, rank: int | None, epoch: int | None, cursor: dict[str, int], limit_bytes: int
    ) -> dict[str, Any]:
        """Whole lines past `cursor` (keys `epoch.rank`, values byte offsets). `ended` once no more can come."""
        attempts = [a for a in record.attempts if epoch in (None, a.epoch)]
        if not attempts and record.attempts:
            raise NotFound(f"{record.job.id} has no attempt {epoch}", f"it has 1 to {record.job.epoch}")
        lines: list[dict[str, Any]] = []
        at = dict(cursor)
        for attempt in attempts:
            for number, node in self._ranks(record, attempt):
                if rank in (None, number):
                    lines += self._of_rank(record.job.id, attempt, number, node, at, limit_bytes)
        lines.sort(key=lambda line: (line["epoch"], line["time"]))
        settled = record.job.state in TERMINAL and record.live is None
        return {"lines": lines, "cursor": at, "ended": settled and not lines}

    def _of_rank(
        self, job: str, attempt: Attempt, rank: int, node: str, at: dict[str, int], limit_bytes: int
    ) -> list[dict[str, Any]]:
        key = f"{attempt.epoch}.{rank}"
        agent = self._agents.get(node)
        if agent is None or not agent.ready:
            return []
        try:
            found = self._agents.call(node, "logs", job, attempt.epoch, rank, at.get(key, 0), limit_bytes)
        except (FleetError, NotFound):
            return []  # not started yet, or the node went away while we asked: its lines come later
        at[key] = found["next"]
        return [line(text, attempt.epoch, rank) for text in found["data"].splitlines()]

    def _ranks(self, record: Record, attempt: Attempt) -> list[tuple[int, str]]:
        """Global ranks of an attempt with the node each ran on."""
        each = [(node_of(d), ranks_of(record.job.task, len(numbers))) for d, numbers in attempt.leases]
        return list(enumerate(node for node, count in each for _ in range(count)))


def line(text: str, epoch: int, rank: int) -> dict[str, Any]:
    """`2026-11-20T23:14:53.123456Z out hello` as its parts."""
    time, _, rest = text.partition(" ")
    stream, _, said = rest.partition(" ")
    return {"time": time, "epoch": epoch, "rank": rank, "stream": STREAMS.get(stream, stream), "text": said}
