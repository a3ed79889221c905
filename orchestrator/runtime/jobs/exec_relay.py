"""`polyfleet exec`: relay commands that run beside the ranks of a job to their nodes, and log them."""

import logging
import shlex
import threading
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from cluster.errors import Conflict, FleetError, NotFound, PolyfleetError
from orchestrator.core.jobs.fold import Record
from orchestrator.core.states import TERMINAL, State
from orchestrator.limits import LimitExceeded
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.jobs.logs import placed_ranks
from orchestrator.terminal_text import one_line
from orchestrator.views.logs import ExecInputView, ExecStarted

log = logging.getLogger(__name__)

MAX_RELAYS = 32
"""Maximum number of commands at a time through this server; each node has its own limit."""
WRITE_S = 2.0
REPLY_S = 20.0
MAX_LOGGED_LENGTH = 2000
RUNNING_STATES = (State.RUNNING, State.SAVING)
Data = dict[str, Any]


class TooManyExecs(LimitExceeded):
    retry_after_s = 10

    def __init__(self, maximum: int):
        super().__init__(f"{maximum} exec commands are running, the maximum", "end some of them, or try again later")
        self.args = (maximum,)


@dataclass(frozen=True, slots=True)
class ExecRequest:
    """A request for a command.

    `command`: empty for a shell. `by`: user name, as the client states it. `term`: TERM.
    """

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
    """A running command. `number`: its id at the node's agent."""

    node: str
    number: str


class ExecRelay:
    """Commands of this server, by their own ids. Thread-safe."""

    def __init__(self, agents: Agents):
        self._agents = agents
        self._lock = threading.Lock()
        self._running: dict[str, Exec] = {}

    def start(self, record: Record, request: ExecRequest) -> ExecStarted:
        """Start a command.

        Raises Conflict, NotFound, FleetError, TooManyExecs.
        """
        if len(self._running) >= MAX_RELAYS:
            raise TooManyExecs(MAX_RELAYS)
        epoch, node = self._locate_rank(record, request.rank)
        order = {
            "rank": request.rank,
            "command": list(request.command),
            "environment": {"TERM": request.term} if request.term else {},
            "terminal": request.terminal,
            "input": request.takes_input,
        }
        arguments = (self._agents.generation, record.job.id, epoch, order, (request.rows, request.columns))
        number = self._agents.call(node, "exec_start", *arguments)
        command_text = shlex.join(request.command)[:MAX_LOGGED_LENGTH] if request.command else "a shell"
        exec_id = uuid4().hex
        with self._lock:
            self._running[exec_id] = Exec(node, number)
        location = f"beside rank {request.rank} of attempt {epoch} of {record.job.id} on {node}"
        log.info(
            "exec %s by %s %s: %s",
            exec_id[:8],
            one_line(request.by) or "an unknown user",
            location,
            one_line(command_text),
        )
        return {"exec": exec_id, "job": record.job.id, "attempt": epoch, "rank": request.rank, "node": node}

    def _locate_rank(self, record: Record, rank: int) -> tuple[int, str]:
        """Return (epoch, node) of a rank that is running now. Raises Conflict, NotFound, FleetError."""
        job, attempt = record.job, record.live_attempt
        if job.state in TERMINAL:
            raise Conflict(
                f"{job.id} has ended: {job.state}", "commands can only join a running job; submit it as a separate job"
            )
        if attempt is None or job.state not in RUNNING_STATES:
            raise Conflict(
                f"{job.id} is not running now: {job.state}",
                f"`polyfleet explain {job.id}` shows what it waits for; try again once it is RUNNING",
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

    def read(self, exec_id: str, offset: int, timeout_s: float) -> Data:
        """Read output; parameters and result as of the agent's `exec_read`. Logs the end of the command."""
        running = self._find(exec_id)
        reply: Data = self._agents.call(
            running.node, "exec_read", running.number, offset, timeout_s, timeout_s=timeout_s + REPLY_S
        )
        if reply["ended"]:
            ended = f"exit code {reply['code']}" if reply["code"] is not None else reply["reason"]
            log.info("exec %s ended: %s", exec_id[:8], ended)
        return reply

    def write(self, exec_id: str, offset: int, data: bytes, end: bool) -> ExecInputView:
        running = self._find(exec_id)
        reply: ExecInputView = self._agents.call(running.node, "exec_write", running.number, offset, data, end, WRITE_S)
        return reply

    def resize(self, exec_id: str, rows: int, columns: int) -> None:
        running = self._find(exec_id)
        self._agents.call(running.node, "exec_resize", running.number, rows, columns)

    def close(self, exec_id: str) -> None:
        """End a command; unknown ids and node errors are ignored: agents end abandoned commands."""
        with self._lock:
            running = self._running.pop(exec_id, None)
        if running is None:
            return
        try:
            self._agents.call(running.node, "exec_close", running.number)
        except PolyfleetError as e:
            log.warning(
                "exec %s could not be ended; the agent of %s will end it: %s", exec_id[:8], running.node, e.message
            )

    def _find(self, exec_id: str) -> Exec:
        running = self._running.get(exec_id)
        if running is None:
            raise NotFound("this command has ended, or the server was restarted", "run it again")
        return running
