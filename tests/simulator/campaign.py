"""Run simulated worlds one after another until a number of events has happened."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulator.invariants import Violation
from tests.simulator.world import Simulation

EVENTS_PER_WORLD = 12_000
PROGRESS_EVERY = 1_000_000
"""Number of events between two progress lines of a long campaign."""


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
        text = f"{seeds}: {self.events:,} events, {rate:,.0f} per second, {len(self.violations)} violations"
        return f"{text}; faults: {faults or 'none'}"


def campaign(
    seed: int,
    events: int,
    per_world: int = EVENTS_PER_WORLD,
    *,
    keep_going: bool = False,
    on_line: Callable[[str], None] = lambda text: None,
) -> CampaignResult:
    """Run worlds with seed, seed + 1, … until `events` have happened.

    Without `keep_going`, stop at the first violation.
    """
    result, start_s, reported_events = CampaignResult(seed, seed), time.perf_counter(), 0
    while result.events < events:
        world = Simulation(result.next_seed)
        violation = world.run(per_world)
        result.events += world.clock.happened
        for name, count in world.injector.injected.items():
            result.faults[name] = result.faults.get(name, 0) + count
        if violation:
            result.violations.append((result.next_seed, world.clock.happened, violation))
            if not keep_going:
                on_line("\n".join(world.story(violation.job)))
            on_line(f"seed {result.next_seed}, event {world.clock.happened:,}: {violation}")
        result.next_seed += 1
        result.took_s = time.perf_counter() - start_s
        if violation and not keep_going:
            break
        if result.events - reported_events >= PROGRESS_EVERY:
            reported_events = result.events
            on_line(result.summary())
    return result
