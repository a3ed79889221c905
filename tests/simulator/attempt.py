"""Simulated part of an attempt on one node: ranks, supervisor and lease.

Its folder's contents survive the agent.
"""

from typing import TYPE_CHECKING

from workers.protocol.messages import AttemptStatus, Failure, Order, Outcome, RankEvent

if TYPE_CHECKING:
    from tests.simulator.machine import SimulatedNode

CHECKPOINT_S = 5.0
"""Seconds of work between two checkpoints."""
CHECK_S = 0.5
"""Seconds between two checks of the lease by the supervisor."""
SETTLED_S = 2.0
"""Seconds that a stale attempt may run after it was thawed."""
ENDED_BY = {"preempt": "preempted", "cancel": "cancelled", "fence": "fenced"}


class SimulatedAttempt:
    """A part of an attempt.

    `ended`: none of its processes runs. `work_s`: remaining work of `script` after `step`.
    """

    __slots__ = (
        *("key", "job", "epoch", "rank", "machine", "devices", "lease_s", "deadline_s", "grace_s", "phase", "step"),
        *("stop", "ended", "outcome", "events", "at", "frozen", "thawed_s", "work_s", "script", "nodes", "number"),
        "first_rank",
    )

    def __init__(self, machine: "SimulatedNode", order: Order, now_s: float, step: int, number: int):
        self.key = f"{order.job}.{order.epoch}.{order.node_rank}"
        self.job, self.epoch, self.rank = order.job, order.epoch, order.node_rank
        self.first_rank = order.first_rank
        self.machine, self.devices, self.nodes = machine, order.devices, order.nodes
        self.lease_s, self.grace_s = order.lease_s, order.grace_s
        self.deadline_s = now_s + order.lease_s
        self.phase, self.stop, self.step, self.number = "starting", "", step, number
        self.ended = False
        self.outcome: Outcome | None = None
        self.events: list[RankEvent] = []
        self.at = 0
        self.frozen = False
        self.thawed_s = -1e9
        self.script = machine.world.scripts[order.job]
        self.work_s = max(0.0, self.script.work_s - step)
        machine.world.after(machine.world.rng.uniform(0.1, 0.6), self.start_ranks)

    def is_exempt(self, now_s: float) -> bool:
        """Whether nothing of it runs, or it was just thawed and is about to find its lease expired."""
        return self.ended or self.frozen or self.machine.frozen or now_s - self.thawed_s <= SETTLED_S

    def is_frozen(self) -> bool:
        return self.frozen or self.machine.frozen

    def renew(self, now_s: float, granted_s: float) -> None:
        if not self.ended and now_s < self.deadline_s:
            self.deadline_s = max(self.deadline_s, granted_s + self.lease_s)

    def check_lease(self) -> None:
        """Check the lease; an expired one ends the attempt."""
        world = self.machine.world
        if self.ended:
            return
        if self.is_frozen():
            world.after(0.5, self.check_lease)
        elif world.now_s >= self.deadline_s:
            reason = "its lease expired: neither the server nor a fence could be reached"
            self.end("lost", self.failure("lost", reason), -9)
        else:
            world.after(self.deadline_s - world.now_s + world.rng.uniform(0.0, CHECK_S), self.check_lease)

    def start_ranks(self) -> None:
        world = self.machine.world
        if self.ended:
            return
        if self.is_frozen():
            world.after(0.5, self.start_ranks)
            return
        self.check_lease()
        if self.stop or self.ended:
            return
        self.phase = "running"
        self.machine.send_updates()
        self.work()

    def work(self) -> None:
        """Work until the next checkpoint, failure or end."""
        world = self.machine.world
        fails = self.script.failure(self.number, self.rank)
        left_s = fails[0] if fails else self.work_s + world.rng.uniform(0.0, 0.3)
        if fails and not self.events:
            world.after(left_s, self.fail, fails[1])
        elif left_s <= CHECKPOINT_S:
            world.after(left_s, self.finish)
        else:
            world.after(CHECKPOINT_S, self.save, True)

    def save(self, continues: bool) -> None:
        """Commit a checkpoint, if the lease has not expired."""
        world = self.machine.world
        if self.ended or (self.stop and continues):
            return
        if self.is_frozen():
            world.after(0.5, self.save, continues)
            return
        if world.now_s < self.deadline_s:
            self.step = min(int(self.script.work_s), self.step + int(CHECKPOINT_S))
            self.work_s = max(0.0, self.work_s - CHECKPOINT_S)
            if self.rank == 0:
                world.committed(self)
                self._add_event("checkpoint", path=f"/store/{self.job}/step-{self.step}", step=self.step)
                self._add_event("report", step=self.step, loss=1.0)
        if continues:
            self.work()

    def _add_event(self, kind: str, **data: object) -> None:
        self.at += 100
        self.events.append(RankEvent(kind, 0, self.machine.world.wall_s, self.at, data))
        self.machine.send_updates()

    def fail(self, kind: str) -> None:
        if self.is_frozen():
            self.machine.world.after(0.5, self.fail, kind)
        elif not (self.stop or self.ended):
            self.end(
                "failed", self.failure(kind, f"its code ended with {kind}"), -9 if kind in ("signal", "oom") else 1
            )

    def finish(self) -> None:
        if self.is_frozen():
            self.machine.world.after(0.5, self.finish)
        elif not self.ended and self.stop in ("", "preempt"):
            self.end("succeeded", None, 0)

    def request_stop(self, mode: str) -> None:
        """Handle a stop request. `cancel` and `fence` replace `preempt`; nothing replaces them."""
        world = self.machine.world
        if self.ended or self.stop in ("cancel", "fence") or self.stop == mode:
            return
        self.stop = mode
        save_s = world.rng.uniform(0.1, self.grace_s) if mode == "preempt" else world.rng.uniform(0.05, 1.0)
        world.after(save_s, self._stop, mode)

    def _stop(self, mode: str) -> None:
        if self.ended or self.stop != mode:
            return
        if self.is_frozen():
            self.machine.world.after(0.5, self._stop, mode)
            return
        if mode == "preempt":
            self.save(False)
        self.end(ENDED_BY[mode])

    def failure(self, kind: str, message: str) -> Failure:
        return Failure(self.first_rank, self.machine.label, kind, message)

    def end(self, state: str, failure: Failure | None = None, code: int | None = -15) -> None:
        """End the part. `code`: exit code of its rank, None if its supervisor does not know it."""
        if self.ended:
            return
        self.ended = True
        self.phase = "ended"
        codes = {} if code is None else {self.first_rank: code}
        self.outcome = Outcome(self.job, self.epoch, self.rank, state, codes, failure)
        world = self.machine.world
        world.processes[self.job].remove(self)
        if state in ("failed", "lost", "cancelled", "fenced") and self.nodes > 1:
            world.disconnect_others(self)
        self.machine.send_updates()

    def connection_lost(self) -> None:
        """Fail because another part has ended, unless this one is already stopping."""
        if self.is_frozen():
            self.machine.world.after(0.5, self.connection_lost)
        elif not (self.ended or self.stop):
            self.end("failed", self.failure("user", "connection closed by peer"), 1)

    def status(self, cursor: int, last_phase: str) -> AttemptStatus | None:
        if self.phase == last_phase and cursor >= self.at:
            return None
        events = tuple(event for event in self.events if event.at > cursor)
        return AttemptStatus(self.job, self.epoch, self.rank, self.phase, events, self.at, self.outcome)
