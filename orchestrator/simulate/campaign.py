"""Many worlds, one after another, until so many events have happened."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.simulate.invariants import Violation
from orchestrator.simulate.world import Simulation

EVENTS_PER_WORLD = 12_000
TOLD_EVERY = 1_000_000
"""Events: so often a long campaign tells how far it is."""


@dataclass(slots=True)
class CampaignResult:
    first_seed: int
    next_seed: int
    events: int = 0
    took_s: float = 0.0
    violations: list[tuple[int, int, Violation]] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)

    def summary(self) -> str:
        rate = self.events / max(self.took_s, 1e-9)
        faults = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        seeds = f"seeds {self.first_seed} to {self.next_seed - 1}"
        told = f"{seeds}: {self.events:,} events, {rate:,.0f} per second, {len(self.violations)} violations"
        return f"{told}; faults: {faults or 'none'}"


def campaign(
    seed: int,
    events: int,
    per_world: int = EVENTS_PER_WORLD,
    *,
    keep_going: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> CampaignResult:
    """Worlds of seed, seed + 1, … It ends with the first violation, unless it keeps going."""
    found, began_s, told = CampaignResult(seed, seed), time.perf_counter(), 0
    while found.events < events:
        world = Simulation(found.next_seed)
        violation = world.run(per_world)
        found.events += world.clock.happened
        for name, count in world.injector.injected.items():
            found.faults[name] = found.faults.get(name, 0) + count
        if violation:
            found.violations.append((found.next_seed, world.clock.happened, violation))
            if not keep_going:
                tell("\n".join(world.story(violation.job)))
            tell(f"seed {found.next_seed}, event {world.clock.happened:,}: {violation}")
        found.next_seed += 1
        found.took_s = time.perf_counter() - began_s
        if violation and not keep_going:
            break
        if found.events - told >= TOLD_EVERY:
            told = found.events
            tell(found.summary())
    return found
