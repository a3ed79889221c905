"""A simulated node's part of an attempt: its ranks, its supervisor, its lease. What stands in its folder outlives its
agent.
"""

from typing import TYPE_CHECKING

from workers.messages import AttemptStatus, Failure, Order, Outcome, RankEvent

if TYPE_CHECKING:
    from orchestrator.simulate.machine import SimulatedNode

CHECKPOINT_S = 5.0
"""Of work between two checkpoints."""
LOOK_S = 0.5
"""A supervisor looks at its lease so often."""
SETTLED_S = 2.0
"""A stale attempt may live so long after it was thawed."""
ENDED_BY = {"preempt": "preempted", "cancel": "cancelled", "fence": "fenced"}


class SimulatedAttempt:
    """`ended` is set once no process of it runs. `work_s` is left of `script` when it starts from `step`."""

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
        machine.world.after(machine.world.rng.uniform(0.1, 0.6), self.ranks_up)

    def exempt(self, now_s: float) -> bool:
        """Nothing of it runs now, or it was thawed just now and finds its lease gone."""
        return self.ended or self.frozen or self.machine.frozen or now_s - self.thawed_s <= SETTLED_S

    def still(self) -> bool:
        return self.frozen or self.machine.frozen

    def renew(self, now_s: float, asked_s: float) -> None:
        if not self.ended and now_s < self.deadline_s:
            self.deadline_s = max(self.deadline_s, asked_s + self.lease_s)

    def look(self) -> None:
        """At its lease: a passed one ends it."""
        world = self.machine.world
        if self.ended:
            return
        if self.still():
            world.after(0.5, self.look)
        elif world.now_s >= self.deadline_s:
            why = "its lease passed: neither the server nor a fence could be reached"
            self.end("lost", self.failure("lost", why), -9)
        else:
            world.after(self.deadline_s - world.now_s + world.rng.uniform(0.0, LOOK_S), self.look)

    def ranks_up(self) -> None:
        world = self.machine.world
        if self.ended:
            return
        if self.still():
            world.after(0.5, self.ranks_up)
            return
        self.look()
        if self.stop or self.ended:
            return
        self.phase = "running"
        self.machine.told()
        self.work()

    def work(self) -> None:
        """Until the next checkpoint, failure or end."""
        world = self.machine.world
        fails = self.script.failure(self.number, self.rank)
        left_s = fails[0] if fails else self.work_s + world.rng.uniform(0.0, 0.3)
        if fails and not self.events:
            world.after(left_s, self.fail, fails[1])
        elif left_s <= CHECKPOINT_S:
            world.after(left_s, self.finish)
        else:
            world.after(CHECKPOINT_S, self.save, True)

    def save(self, goes_on: bool) -> None:
        """A checkpoint is committed only while the lease holds."""
        world = self.machine.world
        if self.ended or (self.stop and goes_on):
            return
        if self.still():
            world.after(0.5, self.save, goes_on)
            return
        if world.now_s < self.deadline_s:
            self.step = min(int(self.script.work_s), self.step + int(CHECKPOINT_S))
            self.work_s = max(0.0, self.work_s - CHECKPOINT_S)
            if self.rank == 0:
                world.committed(self)
                self._tell("checkpoint", path=f"/store/{self.job}/step-{self.step}", step=self.step)
                self._tell("report", step=self.step, loss=1.0)
        if goes_on:
            self.work()

    def _tell(self, kind: str, **data: object) -> None:
        self.at += 100
        self.events.append(RankEvent(kind, 0, self.machine.world.wall_s, self.at, data))
        self.machine.told()

    def fail(self, kind: str) -> None:
        if self.still():
            self.machine.world.after(0.5, self.fail, kind)
        elif not (self.stop or self.ended):
            self.end(
                "failed", self.failure(kind, f"its code ended with {kind}"), -9 if kind in ("signal", "oom") else 1
            )

    def finish(self) -> None:
        if self.still():
            self.machine.world.after(0.5, self.finish)
        elif not self.ended and self.stop in ("", "preempt"):
            self.end("succeeded", None, 0)

    def asked(self, how: str) -> None:
        """`cancel` and `fence` replace `preempt`, and nothing replaces these."""
        world = self.machine.world
        if self.ended or self.stop in ("cancel", "fence") or self.stop == how:
            return
        self.stop = how
        save_s = world.rng.uniform(0.1, self.grace_s) if how == "preempt" else world.rng.uniform(0.05, 1.0)
        world.after(save_s, self._stop, how)

    def _stop(self, how: str) -> None:
        if self.ended or self.stop != how:
            return
        if self.still():
            self.machine.world.after(0.5, self._stop, how)
            return
        if how == "preempt":
            self.save(False)
        self.end(ENDED_BY[how])

    def failure(self, kind: str, message: str) -> Failure:
        return Failure(self.first_rank, self.machine.label, kind, message)

    def end(self, state: str, failure: Failure | None = None, code: int | None = -15) -> None:
        """`code` is that of its rank; None where its supervisor can tell none."""
        if self.ended:
            return
        self.ended = True
        self.phase = "ended"
        codes = {} if code is None else {self.first_rank: code}
        self.outcome = Outcome(self.job, self.epoch, self.rank, state, codes, failure)
        world = self.machine.world
        world.processes[self.job].remove(self)
        if state in ("failed", "lost", "cancelled", "fenced") and self.nodes > 1:
            world.sisters_lose(self)
        self.machine.told()

    def connection_lost(self) -> None:
        """A sister's end breaks what this part was doing, unless it has begun to stop."""
        if self.still():
            self.machine.world.after(0.5, self.connection_lost)
        elif not (self.ended or self.stop):
            self.end("failed", self.failure("user", "connection closed by peer"), 1)

    def report(self, cursor: int, known: str) -> AttemptStatus | None:
        if self.phase == known and cursor >= self.at:
            return None
        told = tuple(event for event in self.events if event.at > cursor)
        return AttemptStatus(self.job, self.epoch, self.rank, self.phase, told, self.at, self.outcome)
