"""What agents report, turned into events: started, checkpoint, metrics, and how each part ended."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

from cluster.errors import PolyfleetError
from orchestrator.core.fold import Record
from orchestrator.core.model import Event
from orchestrator.core.states import State
from orchestrator.runtime.agents import Agents
from orchestrator.runtime.jobs import Jobs, NotStored
from orchestrator.runtime.live import Live, Part, lost_outcome
from orchestrator.store import EventStore
from workers.messages import Outcome, RankEvent, Unusable

log = logging.getLogger(__name__)

# Added to a lease before its attempt is taken for dead: a supervisor looks at its lease every half second.
LEASE_MARGIN_S = 2.0


class Follower:
    """Only the runtime's own thread calls it. `lives` is by job id and shared with the loop. `later` runs a function
    in another thread: asking an agent may take as long as its time-out.
    """

    def __init__(
        self,
        jobs: Jobs,
        store: EventStore,
        agents: Agents,
        lives: dict[str, Live],
        later: Callable[..., object] = lambda function, *arguments: function(*arguments),
    ):
        self._jobs, self._store, self._agents, self._lives = jobs, store, agents, lives
        self._later = later
        self._dismissing: set[tuple[str, str, int]] = set()
        self._lock = threading.Lock()

    def heard(self, node: str, answer: dict[str, Any]) -> None:
        """One ended watch of a node."""
        self._agents.heard(node, answer.get("facts"))
        if "poison" in answer and (agent := self._agents.get(node)) is not None:
            for key in answer["poison"].keys() - agent.poison.keys():
                log.warning(
                    "attempt %s on %s wrote what cannot be used: %s", key, node, answer["poison"][key]["reason"]
                )
            agent.poison = answer["poison"]
        for report in answer["reports"]:
            try:
                self._report(node, report)
            except NotStored:
                raise
            except Exception as e:
                self._spoil(node, report, repr(e))
        if answer["attempts"] is not None:
            self._missing(node, set(answer["attempts"]))
            self._forget_strangers(node, set(answer["attempts"]))

    def _report(self, node: str, report: dict[str, Any]) -> None:
        live = self._lives.get(report["job"])
        if live is None or live.epoch != report["epoch"]:
            self._of_no_life(node, report)
            return
        part = live.parts[report["node_rank"]]
        for event in report["events"] if not part.spoiled else ():
            self._absorb(live, part, event)
        part.phase, part.cursor = report["phase"], report["cursor"]
        record = self._jobs[live.job]
        if live.running and record.job.state is State.STARTING:
            self._jobs.record(Event(live.job, "started", live.epoch, time.time()))
        if report["outcome"] is not None:
            self._part_ended(live, report["node_rank"], part, report["outcome"])

    def _part_ended(self, live: Live, rank: int, part: Part, outcome: dict[str, Any]) -> None:
        why = part.spoiled
        try:
            outcome = Outcome.parse_of((live.job, live.epoch, rank), outcome).to_plain()
        except Unusable as e:
            why = why or str(e)
        part.ended = self._lost(live, rank, part, f"its outcome {why}", "failed", "unreadable") if why else outcome

    def _spoil(self, node: str, report: Any, why: str) -> None:
        """What an agent told of one attempt cannot be used: this concerns that attempt only, which is stopped."""
        live = self._lives.get(str(report.get("job"))) if isinstance(report, dict) else None
        rank = report["node_rank"] if live and report.get("node_rank") in range(len(live.parts)) else None
        if live is None or rank is None or live.epoch != report.get("epoch"):
            log.error("node %s: a report that cannot be used is dropped: %s", node, why)
            return
        part = live.parts[rank]
        if not part.spoiled:
            log.exception("attempt %s: what node %s told of it cannot be used", live.part_key(rank), node)
            part.spoiled = f"cannot be used: {why}"
        part.cursor = report["cursor"] if isinstance(report.get("cursor"), int) else part.cursor
        if report.get("phase") == "ended":
            self._part_ended(live, rank, part, {})

    def _of_no_life(self, node: str, report: dict[str, Any]) -> None:
        """An older attempt is dismissed. One that the store never placed is not ours to stop: the store may be the
        wrong one. It is noted, and its node takes nothing new while it runs.
        """
        job, epoch = report["job"], report["epoch"]
        record, agent = self._jobs.get(job), self._agents.get(node)
        known = record is not None and (epoch <= record.job.epoch or job in self._jobs.damaged)
        if not known and agent is not None:
            agent.strangers[f"{job}.{epoch}.{report['node_rank']}"] = (report["cursor"], report["phase"])
            return
        self._later(self.dismiss, node, job, epoch, report["phase"] == "ended")

    def _forget_strangers(self, node: str, there: set[str]) -> None:
        strangers = self._agents[node].strangers
        for key in set(strangers) - there:
            del strangers[key]

    def dismiss(self, node: str, job: str, epoch: int, ended: bool) -> None:
        """An attempt that no longer counts: stop it, or let its node forget it once it has ended.

        Not twice at once: every report of it asks for this again.
        """
        asked = (node, job, epoch)
        with self._lock:
            if asked in self._dismissing:
                return
            self._dismissing.add(asked)
        try:
            self._ask(node, *(("forget", job, epoch) if ended else ("stop", job, epoch, "cancel")))
        finally:
            with self._lock:
                self._dismissing.discard(asked)

    def stop(self, node: str, job: str, epoch: int, how: str) -> bool:
        """Ask for it; whether the node has heard."""
        return self._ask(node, "stop", job, epoch, how)

    def _ask(self, node: str, what: str, *arguments: Any) -> bool:
        agent = self._agents.get(node)
        if agent is None or not agent.ready:
            return False
        try:
            self._agents.call(node, what, *arguments)
            return True
        except PolyfleetError as e:
            log.warning("asking %s to %s %s: %s", node, what, arguments, e)
            return False

    def _absorb(self, live: Live, part: Part, event: Any) -> None:
        try:
            told = RankEvent.parse(event)
        except Unusable as e:
            log.warning("attempt %s: an event that %s is left out", live.key, e)
            return
        if told.rank != 0 or told.t <= live.told_s:
            return  # rank 0 speaks for all; and what the server before us stored is told again
        if told.type == "checkpoint":
            pool, path = self._place(part, told.data["path"])
            data = {"pool": pool, "path": path, "step": told.data["step"]}
            data |= {key: told.data[key] for key in ("bytes", "seconds", "blocked_s") if key in told.data}
            if data["path"]:
                self._jobs.record(Event(live.job, "checkpoint", live.epoch, told.t, data))
        elif told.type == "report":
            self._store.report(live.job, live.epoch, told.data.get("step", 0), told.t, told.data)
            self._jobs.measured(live.job, told.data)
        live.told_s = told.t

    def _place(self, part: Part, path: str) -> tuple[str, str]:
        """The pool, and the path below its storage: "" for one that user code made up."""
        agent = self._agents.get(part.node)
        facts, whole = agent.facts if agent else None, PurePosixPath(path)
        if facts is None or ".." in whole.parts or not whole.is_relative_to(facts.storage):
            return "", ""
        return facts.pool, str(whole.relative_to(facts.storage))

    def _missing(self, node: str, there: set[str]) -> None:
        """Parts their own node knows nothing of: the order never arrived, or the node's folder is gone.

        Only a watch that was asked for after the orders were given can tell.
        """
        asked_s = self._agents[node].asked_s
        for live in self._lives.values():
            for rank, part in enumerate(live.parts):
                here = part.node == node and part.ended is None and not live.launching
                if here and asked_s > live.seen_s and live.part_key(rank) not in there:
                    part.ended = self._lost(live, rank, part, "its node knows nothing of it")

    def judge_lost(self) -> None:
        """A part whose node is silent for longer than its lease has killed itself by now; before that, nobody may
        replace it.
        """
        for live in self._lives.values():
            lease_s = self._jobs[live.job].job.recovery.lease_s
            for rank, part in enumerate(live.parts):
                agent = self._agents.get(part.node)
                if part.ended is not None or (agent is not None and not agent.lost):
                    continue
                silent_s = time.monotonic() - (agent.last_contact_s if agent else live.seen_s)
                if silent_s > lease_s + LEASE_MARGIN_S:
                    why = agent.lost if agent else "it is not in the fleet"
                    part.ended = self._lost(
                        live, rank, part, f"node {part.node} was lost: {why}; silent for {silent_s:.0f} s"
                    )

    def _lost(
        self, live: Live, rank: int, part: Part, reason: str, state: str = "lost", kind: str = "internal"
    ) -> dict[str, Any]:
        record: Record = self._jobs[live.job]
        return lost_outcome(record.job, live.epoch, rank, part.node, reason, state, kind)
