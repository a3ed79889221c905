"""Simulated node: machine, raylet, agent, and the attempts in its folder."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cluster.catalogue import matches_pattern
from cluster.types import Device, NodeFacts
from orchestrator.core.model import Candidate, Job
from tests.simulator.attempt import SimulatedAttempt
from workers.protocol.messages import PROTOCOL, AttemptStatus, Order

if TYPE_CHECKING:
    from tests.simulator.world import Simulation

FENCES_EVERY_S = 1.0
WATCH_S = 2.0
GATHER_S = (0.0, 0.0, 0.1, 2.0)
"""Maximum seconds for which an agent holds back a reply with only events of ranks; a changed phase is sent at once."""
GIB = 1 << 30
SendReply = Callable[[Any], None]


class Refused(Exception):
    """A node refused a request.

    `newest_epoch`: the newer epoch that is the reason, 0 if there is another reason.
    """

    def __init__(self, message: str, newest_epoch: int = 0):
        super().__init__(message)
        self.newest_epoch = newest_epoch


class RefusedForUser(Refused):
    """A node cannot start a part because of a user's error."""


class SimulatedNode:
    """A node. `attempts`, `newest_epochs` (newest epoch by job) and `generation` are on its disk.

    `ray_id`: "" while no raylet runs. `gone`: it never comes back. `cut_in`: messages to it are lost; `cut_out`:
    messages from it are lost.
    """

    def __init__(self, world: "Simulation", label: str, pool: str, kind: str, count: int):
        self.world, self.label, self.pool, self.kind, self.count = world, label, pool, kind, count
        self.ray_id = ""
        self.powered, self.gone = True, False
        self.frozen = self.agent_stopped = self.agent_up = self.agent_gone = self.agent_fails = False
        self.cut_in = self.cut_out = False
        self.generation = 0
        self.gather_s = world.rng.choice(GATHER_S)
        self.attempts: dict[str, SimulatedAttempt] = {}
        self.newest_epochs: dict[str, int] = {}
        self.last_poll_s = -1e9
        self.waiting: list[Callable[[], None]] = []
        self._watch: tuple[int, Mapping[str, tuple[int, str]], SendReply] | None = None
        self._watches = 0
        self._replies = 0
        self._replied_s: dict[int, float] = {}
        self._facts_sent_s = -1e9
        self._facts: NodeFacts | None = None

    @property
    def is_answering(self) -> bool:
        return self.powered and bool(self.ray_id) and self.agent_up

    @property
    def is_stopped(self) -> bool:
        return self.frozen or self.agent_stopped

    def call(self, action: Callable[[], None]) -> None:
        """Deliver a request to the agent.

        A stopped agent processes it when it continues; a dead one never does.
        """
        if self.is_answering:
            if self.is_stopped:
                self.waiting.append(action)
            else:
                action()

    def resume(self) -> None:
        """Continue after a freeze: process waiting requests, and let attempts check their leases."""
        now_s = self.world.now_s
        for attempt in self.attempts.values():
            if not attempt.ended:
                attempt.thawed_s = now_s
                self.world.after(2.5, self.world.check_alone, attempt)
        self.process_waiting()

    def process_waiting(self) -> None:
        """Process the requests that arrived while the agent was stopped."""
        waiting, self.waiting = self.waiting, []
        for action in waiting:
            self.call(action)

    def could_run(self, job: Job, want: Candidate) -> bool:
        """Whether this node could run one part of the candidate if it were idle."""
        has_enough = want.exclusive or self.count >= want.min_count
        is_allowed = job.recovery.cross_vendor or job.backend in ("", self.pool)
        return (
            has_enough and is_allowed and any(kind == "any" or matches_pattern(kind, self.kind) for kind in want.kinds)
        )

    def facts(self) -> NodeFacts:
        if self._facts is None or self._facts.ray_node_id != self.ray_id:
            backend = self.kind.partition(":")[0]
            devices = tuple(
                Device(backend, self.kind, i, self.kind, total_memory_bytes=16 * GIB) for i in range(self.count)
            )
            self._facts = NodeFacts(
                node=self.label,
                ray_node_id=self.ray_id,
                host=self.label,
                address="10.0.0.1",
                pool=self.pool,
                backend=backend,
                environment=self.pool,
                protocol=PROTOCOL,
                versions={},
                devices=devices,
                cpu_count=8,
                memory_total_bytes=GIB,
                memory_free_bytes=GIB,
                load_1min=0.0,
                disk_free_bytes=9 * GIB,
                agent_pid=1,
                storage="/store",
                storage_id=self.label,
            )
        return self._facts

    def check_generation(self, generation: int) -> None:
        """Accept a controller's generation. Raises Refused if a newer controller has replaced it."""
        if generation < self.generation:
            raise Refused(f"generation {generation} is past: {self.generation} controls this node")
        if generation > self.generation:
            self.generation = generation
            self._facts_sent_s = -1e9

    def poll(
        self, generation: int, last_phases: Mapping[str, tuple[int, str]], reply_number: int, send_reply: SendReply
    ) -> None:
        """Handle a poll by the server. `last_phases`: (cursor, phase) by key. A failing agent replies None.

        `reply_number`: number of the newest reply that has arrived. Leases are renewed from the time of that reply, so
        that a delayed request cannot extend a lease.
        """
        if self.agent_fails:
            send_reply(None)
            return
        try:
            self.check_generation(generation)
        except Refused:
            return
        now_s = self.last_poll_s = self.world.now_s
        if not reply_number:  # a first greeting
            self._facts_sent_s = now_s
            send_reply((self._next_reply_number(), self.facts(), (), None, dict(self.newest_epochs)))
            return
        if (replied_s := self.lease_from(reply_number)) is not None:
            for attempt in self.attempts.values():
                attempt.renew(now_s, replied_s)
        self._watches += 1
        self._watch = (self._watches, last_phases, send_reply)
        self.world.after(WATCH_S, self._poll_timeout, self._watches)
        self.send_updates()

    def lease_from(self, reply_number: int) -> float | None:
        """Time of the reply with number `reply_number`; None if this agent process did not give it."""
        return self._replied_s.get(reply_number)

    def _poll_timeout(self, number: int) -> None:
        if self._watch and self._watch[0] == number:
            self.call(lambda: self._reply(self._new_statuses(self._watch[1])) if self._watch else None)

    def send_updates(self) -> None:
        """Reply to the pending poll if there is something new."""
        if not (
            self._watch
            and self.is_answering
            and not self.is_stopped
            and (statuses := self._new_statuses(self._watch[1]))
        ):
            return
        number, last_phases, _ = self._watch
        if not self.gather_s or any(status.phase != last_phases.get(status.key, (0, ""))[1] for status in statuses):
            self._reply(statuses)
        else:
            self.world.after(self.gather_s, self._poll_timeout, number)

    def _new_statuses(self, last_phases: Mapping[str, tuple[int, str]]) -> list[AttemptStatus]:
        statuses = (attempt.status(*last_phases.get(key, (0, ""))) for key, attempt in self.attempts.items())
        return [status for status in statuses if status is not None]

    def _reply(self, statuses: list[AttemptStatus]) -> None:
        assert self._watch is not None
        send_reply, self._watch = self._watch[2], None
        now_s, facts = self.world.now_s, None
        if now_s - self._facts_sent_s > 10.0:
            facts, self._facts_sent_s = self.facts(), now_s
        send_reply((self._next_reply_number(), facts, tuple(statuses), frozenset(self.attempts), {}))

    def _next_reply_number(self) -> int:
        self._replies += 1
        self._replied_s = {**dict(list(self._replied_s.items())[-3:]), self._replies: self.world.now_s}
        return self._replies

    def start(self, generation: int, order: Order, number: int) -> None:
        """Start a part; idempotent.

        Raises Refused. The fence is read first, and the lease starts at that time.
        """
        self.check_generation(generation)
        key = f"{order.job}.{order.epoch}.{order.node_rank}"
        newest = self.newest_epochs.get(order.job, 0)
        if newest > order.epoch:
            raise Refused(f"epoch {order.epoch} of {order.job} is past: this node's newest is {newest}", newest)
        fence = self.world.ray.fence(order.job)
        if fence is None:
            raise Refused("the fence cannot be read")
        if fence > order.epoch:
            raise Refused(f"epoch {order.epoch} of {order.job} is past: its fence is at {fence}", fence)
        if key in self.attempts or (
            newest == order.epoch and order.node_rank in self.world.removed_parts.get((order.job, order.epoch), ())
        ):
            return
        for attempt in list(self.attempts.values()):
            if attempt.job == order.job and attempt.epoch != order.epoch:
                attempt.request_stop("fence")
        self.newest_epochs[order.job] = order.epoch
        if order.node_rank == self.world.scripts[order.job].refused_rank:
            raise RefusedForUser("the submitted folder cannot be used")
        attempt = SimulatedAttempt(self, order, self.world.now_s, self.world.newest_step(order.job), number)
        self.attempts[key] = attempt
        self.world.started(attempt)
        self.send_updates()

    def stop(self, generation: int, job: str, epoch: int, mode: str) -> None:
        self.check_generation(generation)
        for attempt in list(self.attempts.values()):
            if attempt.job == job and attempt.epoch == epoch:
                attempt.request_stop(mode)

    def remove_files(self, generation: int, job: str, epoch: int) -> None:
        self.check_generation(generation)
        for key, attempt in list(self.attempts.items()):
            if (attempt.job, attempt.epoch) == (job, epoch) and attempt.ended:
                del self.attempts[key]
                self.world.removed_parts.setdefault((job, epoch), set()).add(attempt.rank)

    def check_fences(self) -> None:
        """Renew leases by the fence while the server does not poll; stop attempts below their fence."""
        self.world.after(FENCES_EVERY_S, self.check_fences)
        if not self.is_answering or self.is_stopped:
            return
        now_s = self.world.now_s
        silent_s = now_s - self.last_poll_s
        if silent_s < 3.0:
            return
        for attempt in self.attempts.values():
            if not attempt.ended and silent_s > attempt.lease_s / 3 and not self.cut_out:
                fence = self.world.ray.fence(attempt.job)
                if fence is not None and fence > attempt.epoch:
                    attempt.request_stop("fence")
                elif fence is not None:
                    attempt.renew(now_s, now_s)

    def end_agent(self) -> None:
        """Handle the end of the agent's process: unanswered requests are lost."""
        self.agent_up = self.agent_stopped = False
        self._watch = None
        self._replied_s = {}
        self._facts_sent_s = -1e9
        self.waiting = []
