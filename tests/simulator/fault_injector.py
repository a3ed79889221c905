"""Injects faults into a world: each enabled kind happens repeatedly, at random times, until it heals."""

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING

from tests.simulator.attempt import SimulatedAttempt
from tests.simulator.faults import Faults
from tests.simulator.machine import SimulatedNode

if TYPE_CHECKING:
    from tests.simulator.world import Simulation

SHORT_OR_LONG_S = (0.5, 3.0, 4.0, 9.0, 12.0, 30.0, 60.0)


class Injector:
    def __init__(self, world: "Simulation"):
        self.world = world
        self.active = True
        self.injected: dict[str, int] = {}

    def begin(self) -> None:
        for name, act in INJECTIONS.items():
            if mean_s := getattr(self.world.faults, f"{name}_s"):
                self.world.after(self.world.rng.expovariate(1.0 / mean_s), self._again, name, act, mean_s)

    def _again(self, name: str, act: Callable[["Injector"], None], mean_s: float) -> None:
        if self.active:
            self.injected[name] = self.injected.get(name, 0) + 1
            self.world.note(f"fault: {name}")
            act(self)
            self.world.after(self.world.rng.expovariate(1.0 / mean_s), self._again, name, act, mean_s)

    def machine(self) -> SimulatedNode:
        return self.world.rng.choice(self.world.remaining_machines())

    def random_duration_s(self) -> float:
        return self.world.rng.choice(SHORT_OR_LONG_S)

    def heal(self) -> None:
        """End all faults, and inject no more."""
        self.active = False
        world = self.world
        for machine in world.remaining_machines():
            self.thaw(machine)
            machine.cut_in = machine.cut_out = machine.agent_fails = False
            if not machine.powered:
                self.power(machine)
            elif not machine.ray_id:
                world.ray.join(machine)
        for attempt in [one for one in world.running_attempts() if one.frozen]:
            self.attempt_continues(attempt)
        world.ray.is_away = world.ray.fences_away = world.store.refuses_writes = False
        world.ray.hidden.clear()
        world.server._thaw(world.server.life)
        world.server.start()

    def agent_killed(self) -> None:
        self.world.kill_agent(self.machine(), gone=self.world.rng.random() < 0.2)

    def agent_stopped(self) -> None:
        machine = self.machine()
        if machine.agent_up:
            machine.agent_stopped = True
            self.world.after(self.random_duration_s(), self.agent_continues, machine)

    def agent_continues(self, machine: SimulatedNode) -> None:
        if machine.agent_stopped:
            machine.agent_stopped = False
            if not machine.frozen:
                machine.process_waiting()

    def agent_fails(self) -> None:
        machine = self.machine()
        machine.agent_fails = True
        self.world.after(self.random_duration_s(), self.agent_recovers, machine)

    def agent_recovers(self, machine: SimulatedNode) -> None:
        machine.agent_fails = False

    def machine_frozen(self) -> None:
        machine = self.machine()
        if machine.powered and not machine.frozen:
            machine.frozen = True
            seconds, ray_id = self.random_duration_s(), machine.ray_id
            if seconds > 9.0:
                self.world.after(9.0, self.declared_dead, machine, ray_id)
            self.world.after(seconds, self.thaw, machine)

    def declared_dead(self, machine: SimulatedNode, ray_id: str) -> None:
        """Ray declares a silent node dead; when it comes back, it has another id."""
        if machine.frozen and machine.ray_id == ray_id and ray_id and self.world.rng.random() < 0.8:
            self.world.ray.declare_dead(machine)

    def thaw(self, machine: SimulatedNode) -> None:
        if machine.frozen or machine.agent_stopped:
            machine.frozen = machine.agent_stopped = False
            machine.resume()
            if machine.ray_id and machine.ray_id not in self.world.ray.listed:
                self.raylet_out(machine)

    def attempt_frozen(self) -> None:
        if alive := self.world.running_attempts():
            attempt = self.world.rng.choice(alive)
            attempt.frozen = True
            self.world.after(self.random_duration_s(), self.attempt_continues, attempt)

    def attempt_continues(self, attempt: SimulatedAttempt) -> None:
        attempt.frozen = False
        attempt.thawed_s = self.world.now_s
        self.world.after(2.5, self.world.check_alone, attempt)

    def raylet_killed(self) -> None:
        machine = self.machine()
        if machine.ray_id:
            self.raylet_out(machine)

    def raylet_out(self, machine: SimulatedNode) -> None:
        """End a raylet, and its agent with it. The agent's end is often noticed first."""
        if machine.agent_up and not machine.frozen and self.world.rng.random() < 0.5:
            self.world.server.polling.agent_died(machine, machine.ray_id, gone=False)
        self.world.ray.end_raylet(machine)
        self.world.after(self.world.rng.choice((1.0, 5.0, 25.0)), self.raylet_back, machine)

    def raylet_back(self, machine: SimulatedNode) -> None:
        if machine.powered and not machine.ray_id:
            self.world.ray.join(machine)

    def power_lost(self) -> None:
        self.power_out(self.machine())

    def power_out(self, machine: SimulatedNode) -> None:
        if machine.powered:
            machine.powered = False
            self.world.ray.end_raylet(machine)
            for attempt in list(machine.attempts.values()):
                attempt.end("lost", attempt.failure("lost", "killed from outside, or the node went down"), None)
            machine.frozen = False
            self.world.after(self.world.rng.choice((5.0, 20.0, 60.0)), self.power, machine)

    def power(self, machine: SimulatedNode) -> None:
        if not (machine.powered or machine.gone):
            machine.powered = True
            self.world.ray.join(machine)

    def disk_wiped(self) -> None:
        machine = self.machine()
        if machine.powered:
            self.power_out(machine)
            machine.attempts, machine.newest_epochs, machine.generation = {}, {}, 0

    def machine_gone(self) -> None:
        """Remove a machine permanently, unless it is the last."""
        if len(self.world.remaining_machines()) > 1:
            machine = self.machine()
            machine.gone = True
            self.power_out(machine)

    def rank_killed(self) -> None:
        if alive := self.world.running_attempts():
            attempt = self.world.rng.choice(alive)
            if not attempt.is_frozen():
                attempt.end("failed", attempt.failure("signal", "killed by SIGKILL"), -9)

    def cut_both(self) -> None:
        self.cut(self.machine(), both=True)

    def cut_in(self) -> None:
        machine = self.machine()
        machine.cut_in = True
        self.world.after(self.random_duration_s(), self.join, machine)

    def cut_out(self) -> None:
        machine = self.machine()
        machine.cut_out = True
        self.world.after(self.random_duration_s(), self.join, machine)

    def cut(self, machine: SimulatedNode, both: bool) -> None:
        machine.cut_in = machine.cut_out = both
        ray_id, seconds = machine.ray_id, self.random_duration_s()
        if seconds > 9.0 and ray_id:
            self.world.after(9.0, self.cut_off, machine, ray_id)
        self.world.after(seconds, self.join, machine)

    def cut_off(self, machine: SimulatedNode, ray_id: str) -> None:
        if machine.cut_in and machine.cut_out and machine.ray_id == ray_id:
            self.world.ray.declare_dead(machine)

    def join(self, machine: SimulatedNode) -> None:
        machine.cut_in = machine.cut_out = False
        if machine.ray_id and machine.ray_id not in self.world.ray.listed and machine.powered and not machine.frozen:
            self.raylet_out(machine)

    def flapping(self) -> None:
        """Hide a node from Ray's list for a moment."""
        if listed := sorted(self.world.ray.listed):
            ray_id = self.world.rng.choice(listed)
            self.world.ray.hidden.add(ray_id)
            self.world.after(self.world.rng.choice((1.0, 2.5, 6.0)), self.world.ray.hidden.discard, ray_id)

    def fences_away(self) -> None:
        self.world.ray.fences_away = True
        self.world.after(self.random_duration_s(), self.fences_back)

    def fences_back(self) -> None:
        self.world.ray.fences_away = False

    def ray_away(self) -> None:
        ray = self.world.ray
        if not ray.is_away:
            ray.is_away, ray.away_s = True, self.world.now_s
            self.world.after(self.world.rng.choice((3.0, 12.0, 40.0)), self.ray_back)

    def ray_back(self) -> None:
        self.world.ray.is_away = False

    def head_lost(self) -> None:
        """Lose all of Ray; a new head starts, and nodes join it."""
        ray = self.world.ray
        for machine in self.world.machines:
            ray.end_raylet(machine)
        ray.lose_all(keeps_fences=bool(self.world.faults.older_backup_s) or self.world.rng.random() < 0.5)
        ray.is_away, ray.away_s = True, self.world.now_s
        ray.head += 1
        self.world.after(self.world.rng.choice((3.0, 20.0)), self.ray_back)
        for machine in self.world.machines:
            self.world.after(self.world.rng.uniform(20.0, 30.0), self.raylet_back, machine)

    def second_of_name(self) -> None:
        """Start a second raylet on a machine: for some time there are two live nodes with one label."""
        ray, machine = self.world.ray, self.machine()
        if machine.ray_id:
            from orchestrator.core.controller.messages import ListedNode

            ray_id = f"{self.world.rng.getrandbits(32):08x}"
            ray.listed[ray_id] = ListedNode(ray_id, machine.label)
            self.world.after(self.random_duration_s(), ray.listed.pop, ray_id, None)

    def ray_is_stuck(self) -> None:
        """Lose a message between two of Ray's processes: a device stays reserved although nothing uses it."""
        machine = self.machine()
        if machine.ray_id:
            self.world.ray.stuck.add((machine.ray_id, self.world.rng.randrange(machine.count)))

    def notice(self) -> None:
        ray, machine = self.world.ray, self.machine()
        if (row := ray.listed.get(machine.ray_id)) is not None:
            from dataclasses import replace

            ray.listed[machine.ray_id] = replace(row, draining_s=30.0)
            self.world.after(20.0, self.power_out, machine)

    def server_killed(self) -> None:
        self.world.server.kill()

    def server_stopped(self) -> None:
        self.world.server.freeze(self.random_duration_s())

    def older_backup(self) -> None:
        self.world.restore()

    def store_refuses(self) -> None:
        self.world.store.refuses_writes = True
        self.world.after(self.world.rng.choice((1.0, 8.0, 30.0)), self.store_recovers)

    def store_recovers(self) -> None:
        self.world.store.refuses_writes = False

    def clock_set(self) -> None:
        self.world.wall_offset_s += self.world.rng.choice((-3600.0, 3600.0, -3.2e8, 3.2e8))


NAMES = [f.name.removesuffix("_s") for f in fields(Faults) if f.name.endswith("_s")]
INJECTIONS: dict[str, Callable[[Injector], None]] = {name: getattr(Injector, name) for name in NAMES}
