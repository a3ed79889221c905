"""Target of a benchmark run: one device, measured through a session of the job that holds its node."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from cluster.errors import FleetError, NotFound, UserError
from cluster.fleet import fleet_record
from orchestrator.benchmark.round_runner import SessionEnded, TargetLost
from orchestrator.core.controller.attempts import node_of
from orchestrator.core.jobs.fold import Attempt, Record
from orchestrator.core.states import TERMINAL, State
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.jobs.jobs import Jobs

POLL_S = 0.2
START_S = 180.0
"""Seconds a session may take for its first response: it imports torch and opens its device."""
VERDICT_S = 60.0
"""Seconds the fleet may take to find out why a session does not respond."""
REPLY_S = 5.0
"""Seconds within which an idle session describes itself."""
Data = dict[str, Any]


def wait_for_devices(jobs: Jobs, job: str) -> tuple[int, ...]:
    """Wait until a session's job runs, and return the numbers of the devices that it holds.

    Raises TargetLost.
    """
    return _wait_until_running(jobs, job).allocation[0][1]


class FleetTarget:
    """One device under test, measured through the session of the job's current attempt.

    `position`: index of the device among those that the session sees. `opened` is called each time a new session has
    answered for the first time.
    """

    def __init__(
        self, name: str, position: int, job: str, jobs: Jobs, agents: Agents, opened: "Callable[[FleetTarget], None]"
    ):
        self.id, self.job = name, job
        self.host = ""
        self.facts: Data = {}
        self._position, self._on_opened = position, opened
        self._jobs, self._agents, self._epoch = jobs, agents, 0

    def view(self) -> Data:
        """The target as the run's log lists it."""
        return {"target": self.id, "job": self.job} | {k: self.facts[k] for k in ("kind", "pool", "node", "number")}

    def open(self) -> None:
        """Wait until the job's session responds, and read the facts of its device. Raises TargetLost."""
        attempt = _wait_until_running(self._jobs, self.job)
        self._epoch = attempt.epoch
        described = self._describe(time.monotonic() + START_S)
        node = node_of(attempt.allocation[0][0])
        facts = self._agents[node].facts
        self.host = described["host"]
        self.facts = described | {
            "pool": attempt.pool,
            "kind": attempt.kind,
            "node": node,
            "number": attempt.allocation[0][1][self._position],
            "job": self.job,
            "versions": dict(facts.versions) if facts else {},
            "price_per_hour": _price(attempt.pool),
            "price_source": "the fleet's file",
        }
        self._on_opened(self)

    def call(self, message: Data, timeout_s: float) -> Data:
        """Call the session; retry once if only the connection failed, as when an agent was killed.

        Raises SessionEnded, TargetLost.
        """
        try:
            return self._call_once(message, timeout_s)
        except (FleetError, NotFound) as e:
            if not self._wait_for_session(str(e), timeout_s):
                raise SessionEnded(self._end_reason(str(e))) from e
        try:
            return self._call_once(message, timeout_s)
        except (FleetError, NotFound) as e:
            self._wait_for_session(str(e), timeout_s)
            raise SessionEnded(self._end_reason(str(e))) from e

    def _call_once(self, message: Data, timeout_s: float) -> Data:
        try:
            reply: Data = self._request(message, timeout_s)
        except UserError as e:
            return {"failed": e.message}
        return reply

    def end(self) -> None:
        """Request the end of the session, so that its job succeeds. Errors are ignored."""
        try:
            self._request({"do": "end"}, 10.0)
        except (FleetError, NotFound, UserError, TargetLost):
            return

    def _request(self, message: Data, timeout_s: float) -> Any:
        record = self._record()
        if record.job.state in TERMINAL:
            raise TargetLost(_reason(record))
        attempt = record.attempts[-1]
        if attempt.epoch != self._epoch:
            raise FleetError("the session was restarted", "")
        node = node_of(attempt.allocation[0][0])
        request = message | {"device": self._position}
        return self._agents.call(node, "measure", self.job, attempt.epoch, request, timeout_s, timeout_s=timeout_s + 10)

    def _wait_for_session(self, error: str, busy_s: float) -> bool:
        """Wait until the session responds (True) or a new session has replaced it and is opened (False).

        The session may be busy for `busy_s` before it responds. Raises TargetLost if neither happens.
        """
        start_s, waited_s, wait_s = time.monotonic(), 0.0, VERDICT_S
        while waited_s < wait_s:
            record = self._record()
            if record.job.state in TERMINAL:
                raise TargetLost(_reason(record))
            if record.attempts and self._is_lost(record.attempts[-1]):
                raise TargetLost(f"its node is lost: {self._node_trouble(record.attempts[-1])}")
            is_running = record.job.state is State.RUNNING
            is_same = is_running and record.attempts[-1].epoch == self._epoch
            if is_running and not is_same:
                self.open()
                return False
            if is_same and self._is_responding():
                return True
            time.sleep(POLL_S)
            waited_s, wait_s = time.monotonic() - start_s, VERDICT_S + (busy_s if is_same else 0.0)
        raise TargetLost(f"its session has not answered for {waited_s:.0f} s: {error}")

    def _is_responding(self) -> bool:
        """Check that the session of the current attempt responds within REPLY_S."""
        with suppress(FleetError, NotFound, UserError):
            self._request({"do": "describe"}, REPLY_S)
            return True
        return False

    def _is_lost(self, attempt: Attempt) -> bool:
        return bool(self._node_trouble(attempt))

    def _node_trouble(self, attempt: Attempt) -> str:
        agent = self._agents.get(node_of(attempt.allocation[0][0]))
        return "it left the fleet" if agent is None else agent.lost_reason

    def _end_reason(self, error: str) -> str:
        """Reason why the previous attempt ended; `error` if none is recorded."""
        earlier = [a for a in self._record().attempts if a.epoch < self._epoch]
        return (earlier[-1].reason if earlier else "") or error

    def _describe(self, deadline: float) -> Data:
        while True:
            try:
                reply: Data = self._request({"do": "describe", "limit_s": START_S}, START_S)
                return reply
            except (FleetError, NotFound) as e:
                if time.monotonic() > deadline or self._record().job.state is not State.RUNNING:
                    self._raise_lost(str(e))
                time.sleep(POLL_S)

    def _raise_lost(self, error: str) -> None:
        record = self._record()
        raise TargetLost(_reason(record) if record.job.state in TERMINAL else f"its session does not respond: {error}")

    def _record(self) -> Record:
        return self._jobs[self.job]


def _wait_until_running(jobs: Jobs, job: str) -> Attempt:
    deadline = time.monotonic() + START_S
    while True:
        record = jobs[job]
        if record.job.state in TERMINAL:
            raise TargetLost(_reason(record))
        if record.job.state is State.RUNNING:
            return record.attempts[-1]
        if time.monotonic() > deadline and record.job.state is not State.PENDING:
            raise TargetLost(f"its session did not start within {START_S:.0f} s")
        time.sleep(POLL_S)


def _price(pool: str) -> float | None:
    """Price of one device of the pool per hour; None if the fleet file declares none."""
    fleet = fleet_record.read()
    return float(fleet.pools.get(pool, {}).get("price_per_hour") or 0) or None if fleet else None


def _reason(record: Record) -> str:
    failure: Any = record.failure or {}
    message = failure.get("message") if isinstance(failure, dict) else ""
    return str(message or record.reason or f"its job ended as {record.job.state}")
