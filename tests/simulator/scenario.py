"""A short scenario with every kind of event and command, whose jobs always end in the same states.

Tests run it repeatedly: with a crash at each point, with doubled messages, and with clocks that jump.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestrator.core.controller import messages as m
from orchestrator.core.controller.scaling import NodeGroup
from orchestrator.core.model import Candidate, Job, Recovery
from tests.simulator.faults import Faults
from tests.simulator.machine import SimulatedNode
from tests.simulator.quiescence import run_until_quiet
from tests.simulator.users import Script, Users
from tests.simulator.world import Simulation

DURATION_S = 100.0
ONE = Candidate(("cpu",))
ORDINARY = Recovery(grace_s=3.0, lease_s=5.0, backoff_s=0.5)


class ScenarioUsers(Users):
    """Users who do only what the scenario says."""

    def begin(self) -> None:
        """Start nothing at random times."""


class Scenario(Simulation):
    """The world of the scenario, with five nodes.

    Three have two CPU devices each; one has a TPU that is idle until a job moves there; one is started by the
    autoscaler for the only job that needs it.
    """

    def __init__(self, seed: int = 0, *, doubled: float = 0.0, crash_at: str = "", clocks: tuple[float, ...] = ()):
        self._clocks = clocks
        super().__init__(seed, Faults(doubled=doubled), jobs_per_s=1.0)
        self.armed = (crash_at, 1) if crash_at else None

    def _machines(self) -> list[SimulatedNode]:
        cpus = [SimulatedNode(self, f"cpu-{i}", "cpu", "cpu", 2) for i in range(3)]
        self.groups = (NodeGroup("neuron", "neuron", "neuron", "neuron:trn1", 1, {"CPU": 8.0}, 1, keep_idle_s=5.0),)
        self.grown = [SimulatedNode(self, "neuron-0", "neuron", "neuron:trn1", 1)]
        self.grown[0].powered, self.grown[0].gone = False, True
        return [*cpus, SimulatedNode(self, "tpu-0", "tpu", "tpu:v5e", 1), *self.grown]

    def _begin(self) -> None:
        self.users = ScenarioUsers(self, 1.0)
        super()._begin()
        for job in JOBS:
            self.after(job.at_s, self._submit, job)
        for at_s, act in ACTIONS:
            self.after(at_s, act, self)
        for at_s, offset_s in enumerate(self._clocks, start=3):
            self.after(5.0 * at_s, self._set_clock, offset_s)

    def _set_clock(self, offset_s: float) -> None:
        self.wall_offset_s += offset_s

    def _submit(self, scenario_job: "ScenarioJob") -> None:
        more: dict[str, Any] = {
            "priority": scenario_job.priority,
            "recovery": scenario_job.recovery,
            "replicas": scenario_job.replicas,
        }
        job = Job(scenario_job.name, scenario_job.name, "run", (scenario_job.candidate,), **more)
        self.scripts[job.id] = scenario_job.script
        self.processes[job.id] = []
        self.users.send(job)

    def cancel(self, job: str) -> None:
        """Cancel a job; repeat until it is acknowledged, as a client does."""
        if job not in self.cancelled:
            self.users.cancel(job)
            self.after(3.0, self.cancel, job)

    def final_states(self) -> dict[str, str]:
        """Run the scenario and return the final state of every job. Raises Broken."""
        self.clock.run(self.now_s + DURATION_S, 10**9)
        self.healed = True
        run_until_quiet(self)
        return {name: str(record.job.state) for name, record in self.store.records.items()}


@dataclass(frozen=True, slots=True)
class ScenarioJob:
    at_s: float
    name: str
    script: Script
    candidate: Candidate = ONE
    priority: int = 0
    recovery: Recovery = ORDINARY
    replicas: int = 0


RETRIED = Recovery(max_restarts=2, grace_s=3.0, lease_s=5.0, backoff_s=0.5)
GANG = Candidate(("cpu",), nodes=2)
JOBS = (
    ScenarioJob(3.0, "plain", Script(4.0)),
    ScenarioJob(3.2, "gang", Script(8.0), GANG),
    ScenarioJob(3.4, "long", Script(30.0), replicas=1),
    ScenarioJob(3.6, "fails", Script(8.0, tuple((start, 0, 1.0, "user") for start in range(9)), may_fail=True)),
    ScenarioJob(9.0, "again", Script(8.0, ((0, 0, 1.0, "user"),)), recovery=RETRIED),
    ScenarioJob(12.0, "urgent", Script(3.0), Candidate(("cpu",), count=2, min_count=2, nodes=3), priority=9),
    ScenarioJob(14.0, "cancelled", Script(60.0)),
    ScenarioJob(15.0, "moved", Script(30.0)),
    ScenarioJob(
        16.0, "nowhere", Script(1.0, may_fail=True), Candidate(("tpu:v5p",)), recovery=Recovery(on_disconnect="stop")
    ),
    ScenarioJob(22.0, "grown", Script(3.0), Candidate(("neuron:trn1",))),
    ScenarioJob(40.0, "cut off", Script(40.0), GANG),
    ScenarioJob(41.0, "overtaken", Script(12.0)),
    ScenarioJob(72.0, "withheld", Script(2.0), Candidate(("tpu:v5e",))),
)


def migrate(world: Scenario) -> None:
    if "moved" in world.server.control.records:
        world.moved.add("moved")
        world.server.receive(m.MigrateRequested("moved", ("tpu:v5e",)))


def agent_hangs(world: Scenario) -> None:
    world.machines[2].agent_stopped = True
    world.after(30.0, world.injector.agent_continues, world.machines[2])


def cut(world: Scenario) -> None:
    world.injector.cut(world.machines[1], both=True)


def raise_newest_epoch(world: Scenario) -> None:
    """Let nodes have an epoch that is not in the log, as after a restore of an older backup."""
    for machine in world.machines:
        machine.newest_epochs["overtaken"] = 3


def restart_server(world: Scenario) -> None:
    world.server.kill()


def restart_raylet(world: Scenario) -> None:
    world.injector.raylet_out(world.machines[0])


def ray_is_stuck(world: Scenario) -> None:
    world.ray.stuck.add((world.machines[3].ray_id, 0))


ACTIONS: tuple[tuple[float, Callable[[Scenario], None]], ...] = (
    (20.0, migrate),
    (21.0, lambda world: world.cancel("cancelled")),
    (23.0, lambda world: world.server.receive(m.RenameRequested("long", "longer"))),
    (25.0, lambda world: world.server.receive(m.DrainRequested("cpu-0", "service", now=True))),
    (30.0, lambda world: world.server.receive(m.ResumeRequested("cpu-0"))),
    (31.0, lambda world: world.server.receive(m.ResumeRequested("cpu-9"))),
    (33.0, restart_raylet),
    (35.0, lambda world: world.server.receive(m.PartUnreadable("plain", 9, 0, "it is of no attempt"))),
    (38.0, raise_newest_epoch),
    (45.0, restart_server),
    (55.0, cut),
    (70.0, agent_hangs),
    (71.0, ray_is_stuck),
)
