"""`python -m orchestrator.simulate --seed N --events N [--worlds N] [--planted NAME]`"""

import argparse
import sys
import time

from orchestrator.simulate.world import World

EVENTS_PER_WORLD = 20_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.simulate", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first world; the next ones follow")
    parser.add_argument("--events", type=int, default=100_000, help="in all worlds together")
    parser.add_argument("--per-world", type=int, default=EVENTS_PER_WORLD)
    parser.add_argument("--keep-going", action="store_true", help="after a violation")
    asked = parser.parse_args()
    began, done, seed, bad = time.perf_counter(), 0, asked.seed, 0
    injected: dict[str, int] = {}
    while done < asked.events:
        world = World(seed)
        violation = world.run(asked.per_world)
        done += world.clock.happened
        for name, count in world.injector.injected.items():
            injected[name] = injected.get(name, 0) + count
        if violation:
            bad += 1
            if not asked.keep_going:
                print("\n".join(world.story(violation.job)))
            print(f"seed {seed}, event {world.clock.happened}: {violation}")
            if not asked.keep_going:
                break
        seed += 1
    took_s = time.perf_counter() - began
    print(
        f"seeds {asked.seed} to {seed}: {done} events, {done / took_s:,.0f} per second, {bad} violations; faults {injected}"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
