"""Read the output of a job's ranks from their nodes, merged by time."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cluster.errors import FleetError, NotFound, PolyfleetError
from orchestrator.core.controller.attempts import node_of, ranks_of
from orchestrator.core.jobs.fold import Attempt, Record
from orchestrator.core.states import TERMINAL
from orchestrator.log_lines import join_lines, parse_line
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.jobs.log_copies import LogCopies

BACK = "run `polyfleet up` to restart a node that is down"
STAMP = len("2026-11-20T23:14:53.123456Z")
MIN_READ_BYTES = 64 << 10
"""Minimum bytes read per rank: a page of a job with many ranks may be longer than requested."""
TAIL_PAGE_BYTES = 1 << 20
MAX_COMPLETE_LOGS = 10_000


@dataclass
class LogPage:
    """Lines of one rank up to byte `next` of its log. `more`: the log has more lines now."""

    epoch: int
    rank: int
    texts: list[str]
    next: int
    more: bool

    @property
    def key(self) -> str:
        return f"{self.epoch}.{self.rank}"

    @property
    def latest(self) -> str:
        return self.texts[-1][:STAMP]

    def cut(self, latest: str) -> None:
        """Drop lines later than `latest`; they are read again with the next page."""
        keep = next((i for i, text in enumerate(self.texts) if text[:STAMP] > latest), len(self.texts))
        self.next -= sum(len(text.encode()) + 1 for text in self.texts[keep:])
        del self.texts[keep:]


class JobLogs:
    """Reads logs. A cursor maps `epoch.rank` to a byte offset. Thread-safe."""

    def __init__(self, agents: Agents, log_copies: LogCopies):
        self._agents, self._log_copies = agents, log_copies
        self._complete_ends: dict[tuple[str, str], int] = {}  # ends of complete logs
        self._unanswered: dict[str, str] = {}  # why a node did not respond to the last call

    def read(
        self, record: Record, rank: int | None, epoch: int | None, cursor: dict[str, int], limit_bytes: int
    ) -> dict[str, Any]:
        """Read about `limit_bytes` of complete lines after `cursor`, one attempt at a time.

        `ended` in the result: there will be no more lines.
        """
        lines: list[dict[str, Any]] = []
        at = dict(cursor)
        for attempt in self._attempts(record, epoch):
            if lines := self._page(record, attempt, rank, at, limit_bytes):
                break
        return {"job": record.job.id, "lines": lines, "cursor": at, "ended": _is_finished(record) and not lines}

    def tail(self, record: Record, rank: int | None, epoch: int | None, count: int) -> dict[str, Any]:
        """Read the last `count` lines from the ends of the logs; the returned cursor points behind them."""
        lines: list[dict[str, Any]] = []
        at: dict[str, int] = {}
        for attempt in reversed(self._attempts(record, epoch)):
            missing = count - len(lines)
            lines = [*self._last_lines(record, attempt, rank, at, missing), *lines]
        return {"job": record.job.id, "lines": lines, "cursor": at, "ended": _is_finished(record)}

    def unread_notes(self, record: Record, rank: int | None, epoch: int | None, first: int = 0) -> list[str]:
        """After reading: a sentence for each log that is on a node that did not respond.

        Attempts before `first` are not included.
        """
        sentences: dict[str, None] = {}
        for attempt in self._attempts(record, epoch):
            for number, name in placed_ranks(record, attempt, rank) if attempt.epoch >= first else ():
                reason = self._unread_reason(name)
                if reason and not self._log_copies.is_copied(record.job.id, attempt.epoch, number):
                    sentences[f"the log of attempt {attempt.epoch} is on node {name}, {reason}; {BACK}"] = None
        return list(sentences)

    def _unread_reason(self, name: str) -> str:
        """Why the node's logs could not be read, as a clause to follow its name; "" if they were read.

        A node that counts as silent may still respond, and one that does not may be unreachable.
        """
        failed, node = self._unanswered.get(name, ""), self._agents.get(name)
        if node is not None and node.ready and not failed:
            return ""
        return self._agents.away_reason(name) or f"which did not respond ({failed})"

    def _attempts(self, record: Record, epoch: int | None) -> list[Attempt]:
        attempts = [a for a in record.attempts if epoch in (None, a.epoch)]
        if not attempts and record.attempts:
            raise NotFound(f"{record.job.id} has no attempt {epoch}", f"it has 1 to {record.job.epoch}")
        return attempts

    def _last_lines(
        self, record: Record, attempt: Attempt, rank: int | None, at: dict[str, int], count: int
    ) -> list[dict[str, Any]]:
        """The last `count` complete lines.

        A line may be in several pieces; it is complete if one is before it.
        """
        pieces = count + 1 if count else 0
        while True:
            last_pieces = self._last_pieces(record, attempt, rank, at, pieces)
            lines = join_lines(last_pieces)
            if len(lines) > count or len(last_pieces) < pieces or not count:
                return lines[len(lines) - count :] if len(lines) > count else lines
            pieces *= 2

    def _last_pieces(
        self, record: Record, attempt: Attempt, rank: int | None, at: dict[str, int], count: int
    ) -> list[dict[str, Any]]:
        """The last `count` pieces of lines of one attempt. Moves the cursor `at` to the ends of its logs."""
        ends = {}
        for number, node in placed_ranks(record, attempt, rank):
            log = record.job.id, attempt.epoch, number
            if position := self._log_copies.tail(*log, count) or self._call_node(node, "log_tail_range", *log, count):
                key = f"{attempt.epoch}.{number}"
                at[key], ends[key] = position["start"], position["end"]
        last: deque[dict[str, Any]] = deque(maxlen=count)
        while any(at[key] < end for key, end in ends.items()):
            page = self._page(record, attempt, rank, at, TAIL_PAGE_BYTES)
            last.extend(page)
            if not page:
                break
        return list(last)

    def _page(
        self, record: Record, attempt: Attempt, rank: int | None, at: dict[str, int], limit_bytes: int
    ) -> list[dict[str, Any]]:
        """Lines of one attempt, sorted by time. Moves the cursor `at` behind them.

        If a rank's log has more lines, later lines of other ranks wait for the next page, so that the order holds.
        """
        ranks = [
            (n, node) for n, node in placed_ranks(record, attempt, rank) if not self._is_read(record, attempt, n, at)
        ]
        share = max(limit_bytes // max(len(ranks), 1), MIN_READ_BYTES)
        requested = (self._read_rank(record.job.id, attempt.epoch, n, node, at, share) for n, node in ranks)
        pages = [page for page in requested if page is not None]
        first = min((p for p in pages if p.more and p.texts), key=lambda p: p.latest, default=None)
        for page in pages:
            if first is not None and page is not first:
                page.cut(first.latest)
            if page.texts:
                at[page.key] = page.next
        lines = [parse_line(text, page.epoch, page.rank) for page in pages for text in page.texts]
        if len(pages) > 1:
            lines.sort(key=lambda line: str(line["time"]))
        return join_lines(lines)

    def _read_rank(
        self, job: str, epoch: int, rank: int, node: str, at: dict[str, int], limit_bytes: int
    ) -> LogPage | None:
        key = f"{epoch}.{rank}"
        arguments = job, epoch, rank, at.get(key, 0), limit_bytes
        reply = self._log_copies.read(*arguments) or self._call_node(node, "logs", *arguments)
        if reply is None:
            return None
        if reply["ended"]:
            self._remember_end(job, key, reply["next"])
        # Only \n ends a line: output may contain any other separator, which must not start a new line.
        texts = reply["data"].split("\n")
        if not texts[-1]:
            texts.pop()
        return LogPage(epoch, rank, texts, reply["next"], reply["more"])

    def _call_node(self, node: str, method: str, *arguments: Any) -> Any:
        """Call an agent; None if it has no log yet or cannot be reached: its lines come later."""
        agent = self._agents.get(node)
        if agent is None or not agent.ready:
            return None
        try:
            reply = self._agents.call(node, method, *arguments)
        except FleetError as e:
            self._unanswered[node] = e.message
            return None
        except PolyfleetError:
            reply = None
        self._unanswered.pop(node, None)
        return reply

    def _remember_end(self, job: str, key: str, end: int) -> None:
        if len(self._complete_ends) >= MAX_COMPLETE_LOGS:
            self._complete_ends.clear()
        self._complete_ends[job, key] = end

    def _is_read(self, record: Record, attempt: Attempt, rank: int, at: dict[str, int]) -> bool:
        """Whether the cursor is at the end of a complete log, so that its node need not be called for each page."""
        key = f"{attempt.epoch}.{rank}"
        end = self._complete_ends.get((record.job.id, key))
        return end is not None and at.get(key, 0) >= end


def placed_ranks(record: Record, attempt: Attempt, rank: int | None = None) -> Iterator[tuple[int, str]]:
    """Yield (global rank, node) for each rank of an attempt; `rank` selects one rank."""
    launch = record.candidate_of(attempt).launch
    groups = [(node_of(d), ranks_of(record.job.task, launch, len(numbers))) for d, numbers in attempt.allocation]
    nodes = [node for node, count in groups for _ in range(count)]
    return ((number, node) for number, node in enumerate(nodes) if rank in (None, number))


def _is_finished(record: Record) -> bool:
    return record.job.state in TERMINAL and record.live_attempt is None
