"""Commands beside the ranks of a running job: which node is asked, and what is written down of them."""

import logging
import shlex
import threading
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from cluster.errors import Conflict, FleetError, NotFound, PolyfleetError
from orchestrator.core.fold import Record
from orchestrator.core.states import TERMINAL, State
from orchestrator.limits import LimitExceeded
from orchestrator.runtime.agents import Agents
from orchestrator.runtime.logs import placed_ranks
from orchestrator.show.terminal_text import one_line

log = logging.getLogger(__name__)

MOST = 32
"""At a time through one server; a node has a limit of its own."""
WRITE_S = 2.0
ANSWER_S = 20.0
LONGEST_LOGGED = 2000
RUNS = (State.RUNNING, State.SAVING)
Data = dict[str, Any]


class TooManyExecs(LimitExceeded):
    retry_after_s = 10

    def __init__(self, most: int):
        super().__init__(f"{most} commands run beside jobs, the most at a time", "end some of them, or ask again later")
        self.args = (most,)


@dataclass(frozen=True, slots=True)
class Asked:
    """`command` empty: a shell. `by` is who asks, as they say. `term` names the kind of terminal."""

    command: tuple[str, ...]
    rank: int = 0
    terminal: bool = False
    takes_input: bool = False
    rows: int = 24
    columns: int = 80
    term: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class Exec:
    """`number` is what the node's agent calls it."""

    node: str
    number: str


class Execs:
    """Those of one server, by ids of their own. Safe to use from several threads."""

    def __init__(self, agents: Agents):
        self._agents = agents
        self._lock = threading.Lock()
        self._running: dict[str, Exec] = {}

    def start(self, record: Record, asked: Asked) -> Data:
        """{"exec", "job", "epoch", "rank", "node"}. Raises Conflict, NotFound, FleetError, TooManyExecs."""
        if len(self._running) >= MOST:
            raise TooManyExecs(MOST)
        epoch, node = self._place(record, asked.rank)
        order = {
            "rank": asked.rank,
            "command": list(asked.command),
            "environment": {"TERM": asked.term} if asked.term else {},
            "terminal": asked.terminal,
            "input": asked.takes_input,
        }
        asking = (self._agents.generation, record.job.id, epoch, order, (asked.rows, asked.columns))
        number = self._agents.call(node, "exec_start", *asking)
        words = shlex.join(asked.command)[:LONGEST_LOGGED] if asked.command else "a shell"
        known = uuid4().hex
        with self._lock:
            self._running[known] = Exec(node, number)
        where = f"beside rank {asked.rank} of attempt {epoch} of {record.job.id} on {node}"
        log.info("exec %s by %s %s: %s", known[:8], one_line(asked.by) or "somebody", where, one_line(words))
        return {"exec": known, "job": record.job.id, "epoch": epoch, "rank": asked.rank, "node": node}

    def _place(self, record: Record, rank: int) -> tuple[int, str]:
        """(epoch, node) of the rank that runs now."""
        job, attempt = record.job, record.live
        if job.state in TERMINAL:
            raise Conflict(
                f"{job.id} has ended: {job.state}", "a command runs beside a running job; submit it as a job of its own"
            )
        if attempt is None or job.state not in RUNS:
            raise Conflict(
                f"{job.id} does not run now: {job.state}",
                f"`polyfleet explain {job.id}` says what it waits for; ask again once it is RUNNING",
            )
        ranks = dict(placed_ranks(record, attempt))
        if rank not in ranks:
            raise NotFound(f"{job.id} has no rank {rank}", f"its ranks are 0 to {len(ranks) - 1}")
        node = self._agents.get(ranks[rank])
        if node is None or not node.ready:
            raise FleetError(
                f"node {ranks[rank]}, where rank {rank} of {job.id} runs, cannot be reached now",
                "`polyfleet inventory` shows its state",
            )
        return job.epoch, ranks[rank]

    def read(self, known: str, seen: int, timeout_s: float) -> Data:
        """As the agent's `exec_read`."""
        it = self._of(known)
        told: Data = self._agents.call(it.node, "exec_read", it.number, seen, timeout_s, timeout_s=timeout_s + ANSWER_S)
        if told["ended"]:
            ended = f"exit code {told['code']}" if told["code"] is not None else told["reason"]
            log.info("exec %s ended: %s", known[:8], ended)
        return told

    def write(self, known: str, offset: int, data: bytes, end: bool) -> Data:
        it = self._of(known)
        told: Data = self._agents.call(it.node, "exec_write", it.number, offset, data, end, WRITE_S)
        return told

    def resize(self, known: str, rows: int, columns: int) -> None:
        it = self._of(known)
        self._agents.call(it.node, "exec_resize", it.number, rows, columns)

    def close(self, known: str) -> None:
        """Known or not, and whatever its node answers: an agent that is not told ends it by itself."""
        with self._lock:
            it = self._running.pop(known, None)
        if it is None:
            return
        try:
            self._agents.call(it.node, "exec_close", it.number)
        except PolyfleetError as e:
            log.warning("exec %s is left to the agent of %s: %s", known[:8], it.node, e.message)

    def _of(self, known: str) -> Exec:
        found = self._running.get(known)
        if found is None:
            raise NotFound("this command has ended, or the server was started anew", "run it again")
        return found
