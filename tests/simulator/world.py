"""A simulated world: a fleet, a server, users and faults, all derived from one seed."""

from collections import deque
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from orchestrator.core.attempt import story
from orchestrator.core.attempt.story import StoryLine
from orchestrator.core.controller.scaling import NodeGroup
from orchestrator.core.model import Event, Project
from tests.simulator.attempt import SimulatedAttempt
from tests.simulator.clock import VirtualClock
from tests.simulator.fault_injector import Injector
from tests.simulator.faults import Faults, swarm
from tests.simulator.invariants import Broken, Checks, Violation
from tests.simulator.machine import SimulatedNode
from tests.simulator.quotas import draw_projects
from tests.simulator.ray import SimulatedRay
from tests.simulator.server import SimulatedServer
from tests.simulator.simulated_autoscaler import SimulatedAutoscaler
from tests.simulator.store import SimulatedStore
from tests.simulator.users import KINDS, Script, Users

CHUNK_S = 10.0
CHECK_EVERY_S = 4.0
MAX_LINES = 100_000


class Simulation:
    def __init__(
        self,
        seed: int,
        faults: Faults | None = None,
        *,
        jobs_per_s: float | None = None,
        projects: Mapping[str, Project] | None = None,
    ):
        self.seed, self.clock = seed, VirtualClock()
        self.rng = Random(seed)
        self.faults = swarm(self.rng) if faults is None else faults
        self.projects = projects or (draw_projects(seed) if faults is None else {})
        self.project_by_job: dict[str, str] = {}
        self.wall_offset_s = 1.7e9
        self.scripts: dict[str, Script] = {}
        self.processes: dict[str, list[SimulatedAttempt]] = {}
        self.starts: dict[str, list[int]] = {}
        self.steps: dict[str, int] = {}
        self.removed_parts: dict[tuple[str, int], set[int]] = {}
        self.acknowledged: set[str] = set()
        self.cancelled: set[str] = set()
        self.moved: set[str] = set()
        self.unreadable: set[str] = set()
        self.armed: tuple[str, int] | None = None
        self.healed = self.was_restored = False
        self.lines: deque[StoryLine] = deque(maxlen=MAX_LINES)
        self._launches = 0
        self.store, self.ray = SimulatedStore(), SimulatedRay(self)
        self.groups: tuple[NodeGroup, ...] = ()
        self.grown: list[SimulatedNode] = []
        self.machines = list(self._machines())
        self.checks = Checks(self)
        self.server = SimulatedServer(self)
        self.users = Users(self, jobs_per_s or self.rng.choice((0.1, 0.3, 1.0)))
        self.injector = Injector(self)
        self._begin()

    def _machines(self) -> list[SimulatedNode]:
        kinds = self.rng.sample(KINDS, self.rng.choice((1, 2, 2, 3)))
        return [
            SimulatedNode(
                self, f"{kind.partition(':')[0]}-{i}", kind.partition(":")[0], kind, self.rng.choice((1, 2, 4))
            )
            for kind in kinds
            for i in range(self.rng.choice((1, 2, 3)))
        ]

    def _begin(self) -> None:
        if self.grown:
            SimulatedAutoscaler(self).check()
        for machine in self.machines:
            if machine.powered:
                self.ray.join(machine)
            self.after(self.rng.random(), machine.check_fences)
        self.server.start()
        self.users.begin()
        self.injector.begin()
        self._check()

    def _check(self) -> None:
        self.checks.check_silence()
        self.after(CHECK_EVERY_S, self._check)

    @property
    def now_s(self) -> float:
        return self.clock.now_s

    @property
    def wall_s(self) -> float:
        return self.clock.now_s + self.wall_offset_s

    def after(self, delay_s: float, action: Callable[..., Any], *arguments: Any) -> None:
        self.clock.after(delay_s, action, *arguments)

    def add_lines(self, lines: list[StoryLine]) -> None:
        self.lines.extend(lines)

    def note(self, text: str) -> None:
        self.lines.append(story.note(text, self.wall_s))

    def next_launch(self) -> int:
        self._launches += 1
        return self._launches

    def newest_step(self, job: str) -> int:
        return self.steps.get(job, 0)

    def remaining_machines(self) -> list[SimulatedNode]:
        """Machines that are not permanently gone."""
        return [machine for machine in self.machines if not machine.gone]

    def running_attempts(self) -> list[SimulatedAttempt]:
        return [attempt for running in self.processes.values() for attempt in running]

    def started(self, attempt: SimulatedAttempt) -> None:
        self.checks.check_start(attempt)
        self.processes[attempt.job].append(attempt)
        starts = self.starts.setdefault(attempt.job, [])
        if attempt.epoch not in starts:
            starts.append(attempt.epoch)
        attempt.number = starts.index(attempt.epoch)

    def committed(self, attempt: SimulatedAttempt) -> None:
        self.checks.check_commit(attempt)
        self.steps[attempt.job] = max(attempt.step, self.steps.get(attempt.job, 0))

    def check_alone(self, attempt: SimulatedAttempt) -> None:
        self.checks.check_alone(attempt)

    def disconnect_others(self, ended: SimulatedAttempt) -> None:
        for other in self.processes[ended.job]:
            if other.epoch == ended.epoch:
                self.after(self.rng.uniform(0.02, 2.0), other.connection_lost)

    def kill_agent(self, machine: SimulatedNode, gone: bool) -> None:
        ray_id = machine.ray_id
        if machine.agent_up and not machine.frozen:
            machine.end_agent()
            machine.agent_gone = gone
            self.after(self.rng.uniform(0.1, 1.0), self._agent_ended, machine, ray_id, gone)

    def _agent_ended(self, machine: SimulatedNode, ray_id: str, gone: bool) -> None:
        if machine.ray_id != ray_id:
            return
        if not (machine.cut_in or machine.cut_out or self.ray.is_away):
            self.server.polling.agent_died(machine, ray_id, gone)
        if not gone:
            self.after(self.rng.uniform(0.2, 2.0), self._agent_again, machine, ray_id)

    def _agent_again(self, machine: SimulatedNode, ray_id: str) -> None:
        if machine.ray_id == ray_id and machine.powered:
            machine.agent_up = True

    def to_node(self, machine: SimulatedNode, ray_id: str, action: Callable[[], Any]) -> None:
        if machine.cut_in or self._is_lost():
            return
        self.after(self._delay_s(), self._arrives, machine, ray_id, action)

    def _arrives(self, machine: SimulatedNode, ray_id: str, action: Callable[[], Any]) -> None:
        if machine.ray_id != ray_id or machine.cut_in:
            return
        if machine.agent_gone and not self.ray.is_away:
            self.from_node(machine, lambda: self.server.polling.agent_died(machine, ray_id, True))
        machine.call(action)

    def from_node(self, machine: SimulatedNode, action: Callable[[], Any]) -> None:
        if not machine.cut_out and not self._is_lost():
            self.after(self._delay_s(), action)

    def _is_lost(self) -> bool:
        return bool(self.faults.lost) and self.rng.random() < self.faults.lost and not self.healed

    def _delay_s(self) -> float:
        slow = self.faults.slow and not self.healed and self.rng.random() < self.faults.slow
        return self.rng.uniform(0.3, 6.0) if slow else self.rng.uniform(0.001, 0.02)

    def crashes_at(self, point: str) -> bool:
        if self.armed is not None and self.armed[0] == point:
            name, remaining = self.armed
            self.armed = (name, remaining - 1) if remaining > 1 else None
            return remaining == 1
        chance = 0.0 if self.healed else self.faults.crash_points
        return bool(chance) and self.rng.random() < chance

    def restore(self) -> None:
        """Stop the server, and restore an older copy of its store."""
        server, log = self.server, self.store.log
        server.kill()
        if len(log) < 10:
            return
        self.was_restored = True
        self.store.restore(self.rng.randrange(max(1, len(log) - 40), len(log)))
        self.checks.restored()
        records = self.store.records
        self.acknowledged &= records.keys()
        self.cancelled = {job for job in self.cancelled if job in records and records[job].job.state == "CANCELLED"}

    def run(self, events: int) -> Violation | None:
        """Run `events` events under faults, then heal, and check that everything ends.

        Return a violation or None.
        """
        from tests.simulator.quiescence import run_until_quiet

        try:
            self.clock.run(float("inf"), int(events * 0.8))
            self.healed = True
            self.injector.heal()
            run_until_quiet(self)
        except Broken as e:
            return e.violation
        return None

    def story(self, job: str, maximum: int = 6000) -> list[str]:
        """Stored events of a job, then the last lines of its story as the server prints it, and the faults."""
        events = [
            f"{event.time_s:.1f} {event.event} of attempt {event.epoch} {_shown(event)}"
            for event in self.store.log
            if event.job == job
        ]
        steps = story.story(self.lines, job)[-maximum:]
        return events + [story.step_text(step.number, step.wall_s, step.message, step.changes) for step in steps]


def _shown(event: Event) -> dict[str, Any]:
    return {name: value for name, value in event.data.items() if name not in ("job", "spec")}
