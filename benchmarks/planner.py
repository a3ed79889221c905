"""How long a decision takes, and how near it is to the best one: the planner on arrays, HiGHS on the same instances.

    python benchmarks/planner.py [-o json | -o FILE] [--rounds 100] [--quick]

Instances are made from a seed: jobs of 1, 2, 4 or 8 devices (70, 10, 15, 5 %) whose remaining work is log-uniform from
half an hour to a week, on kinds that differ by up to a factor of 30, in nodes of eight devices. A fleet is first filled
by decisions; then each round one job ends and another arrives. `full` decides about all jobs anew from the prices of
the last decision, `incremental` only about those that wait. Both end with the numbers of devices on nodes. CPU time of
one thread. The last line of stdout is one compact JSON object, key figures first.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

import numpy as np
from parts import machine

from orchestrator.core.plan.arrays.numbers import FreeNumbers
from orchestrator.core.plan.arrays.planner_jobs import WAITS, Work
from orchestrator.core.plan.assignment.decision import PriceMemory, decide, fill
from orchestrator.core.plan.policies.priced_policies import DEFAULT, PRICED

NODE = 8
SIZES, SHARES = (1, 2, 4, 8), (0.70, 0.10, 0.15, 0.05)
RESTART_S = 60.0
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", default="json", help="json: only the last line; else a file for all figures")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="small instances, five rounds")
    given = parser.parse_args()
    found = measured(given)
    if given.output != "json":
        Path(given.output).write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(json.dumps(found, separators=(",", ":")) + "\n")


def measured(given: argparse.Namespace) -> Row:
    rounds, smaller = (5, 16) if given.quick else (given.rounds, 1)
    before = machine.load()
    rows = {
        "2048x10000x8": row(2048 // smaller, 10_000 // smaller, 8, rounds),
        "2048x100000x8": row(2048 // smaller, 100_000 // smaller, 8, rounds),
        "2048x2000x8, full fleet": row(2048 // smaller, 2000 // smaller, 8, rounds),
        "2048x10000x8, 8 counts": row(2048 // smaller, 10_000 // smaller, 8, rounds, counts=(1, 2, 3, 4, 5, 6, 7, 8)),
        "16384x10000x8": row(16_384 // smaller, 10_000 // smaller, 8, max(5, rounds // 4)),
        "100000x10000x8": row(100_000 // smaller, 10_000 // smaller, 8, max(5, rounds // 4)),
    }
    first, more = rows["2048x10000x8"], rows["2048x100000x8"]
    key = {
        "full_ms_p50": first["full_ms"]["p50"],
        "full_ms_p99": first["full_ms"]["p99"],
        "incremental_ms_p50": first["incremental_ms"]["p50"],
        "gap_to_lp_percent": first["gap_to_lp_percent"],
        "eight_counts_ms_p50": rows["2048x10000x8, 8 counts"]["full_ms"]["p50"],
        "jobs_16384_ms_p50": rows["16384x10000x8"]["full_ms"]["p50"],
        "jobs_100000_ms_p95": rows["100000x10000x8"]["full_ms"]["p95"],
        "ten_times_the_devices": more["full_ms"]["p50"] / first["full_ms"]["p50"],
    }
    return {**key, "instances": rows, **machine.circumstances(given, before)}


def row(jobs: int, devices: int, kinds: int, rounds: int, counts: tuple[int, ...] = ()) -> Row:
    fleet = Fleet(jobs, devices, kinds, counts)
    for _ in range(3):
        fleet.full()
    full_ms, incremental_ms, gaps, started = [], [], [], []
    for _ in range(rounds):
        fleet.changes()
        incremental_ms.append(cpu_ms(fleet.incremental))
        full_ms.append(cpu_ms(fleet.full))
        gaps.append(fleet.gap)
        started.append(fleet.started)
    return {
        "full_ms": percentiles(full_ms),
        "incremental_ms": percentiles(incremental_ms),
        "running": int((fleet.option != WAITS).sum()),
        "started_or_moved_per_decision": float(np.mean(started)),
        "gap_to_bound_percent": 100 * float(np.mean(gaps)),
        **against_lp(fleet),
    }


class Fleet:
    """`option` is what each job runs as; `free` the devices of each island by node; `place` where each job runs."""

    def __init__(self, jobs: int, devices: int, kinds: int, counts: tuple[int, ...]):
        self.random = np.random.default_rng(jobs + devices + len(counts))
        self.counts, self.kinds = counts, kinds
        nodes = max(1, devices // kinds // NODE)
        self.capacity = np.full(kinds, nodes * NODE)
        self.speed = np.geomspace(1.0, 1 / 30, kinds)
        made = [self.job() for _ in range(jobs)]
        self.devices = np.concatenate([devices for devices, _ in made], axis=1)
        self.seconds = np.concatenate([seconds for _, seconds in made], axis=1)
        self.option, self.memory, self.gap, self.started = np.full(jobs, WAITS), PriceMemory(), 0.0, 0
        self.free = [FreeNumbers([tuple(range(NODE))] * nodes) for _ in range(kinds)]
        self.place: dict[int, tuple[int, int, tuple[int, ...]]] = {}

    @property
    def island(self) -> "np.ndarray":
        return np.repeat(np.arange(self.kinds), max(len(self.counts), 1))

    def job(self) -> tuple["np.ndarray", "np.ndarray"]:
        """(options, 1) of its devices and of its remaining seconds. Of more devices each does 0.9 of what one does."""
        alone_s = 10 ** self.random.uniform(3.3, 5.8)
        rate = self.speed * 10 ** self.random.uniform(-0.3, 0.3, self.kinds)
        rate[self.random.random(self.kinds) < 0.1] = 0.0
        rate[self.random.integers(self.kinds)] = 1.0
        count = np.array(self.counts) if self.counts else np.array([self.random.choice(SIZES, p=SHARES)])
        with np.errstate(divide="ignore"):
            seconds = alone_s / (rate[:, None] * (count**0.9 if self.counts else np.ones(1)))
        return np.tile(count, self.kinds)[:, None], seconds.ravel()[:, None]

    def changes(self) -> None:
        """One job that runs ends, and another arrives in its column."""
        runs = np.flatnonzero(self.option != WAITS)
        index = int(self.random.choice(runs)) if len(runs) else 0
        self._release(index)
        self.option[index] = WAITS
        devices, seconds = self.job()
        self.devices[:, index], self.seconds[:, index] = devices[:, 0], seconds[:, 0]

    def work(self) -> Work:
        return Work.of(
            self.island, self.devices, self.seconds, self.option, restart_s=np.full(len(self.option), RESTART_S)
        )

    def full(self) -> None:
        self.apply(decide(self.work(), self.capacity, DEFAULT, self.memory))

    def incremental(self) -> None:
        self.apply(fill(self.work(), self.capacity, DEFAULT, self.memory))

    def apply(self, decided: Any) -> None:
        """With device numbers. A job for which no node has enough devices together waits."""
        changed = np.flatnonzero(decided.option != self.option)
        for index in changed.tolist():
            self._release(index)
        starts = changed[decided.option[changed] != WAITS]
        sizes = self.devices[decided.option[starts], starts]
        option = decided.option.copy()
        for index, size in sorted(zip(starts.tolist(), sizes.tolist(), strict=True), key=lambda one: -one[1]):
            island = int(self.island[option[index]])
            if (found := self.free[island].allocate(size)) is None:
                option[index] = WAITS
            else:
                self.place[index] = (island, *found)
        self.option, self.memory, self.gap, self.started = option, decided.memory, decided.gap, len(starts)

    def _release(self, index: int) -> None:
        if (held := self.place.pop(index, None)) is not None:
            island, node, numbers = held
            self.free[island].release(node, numbers)


def against_lp(fleet: Fleet) -> Row:
    """The same values given to HiGHS as a linear program: what it finds best, and how long it takes."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    from orchestrator.core.plan.arrays import island_prices, prices
    from orchestrator.core.plan.assignment import decision, rounding
    from orchestrator.core.plan.policies.policy_input import build_input

    work = fleet.work().fitting(fleet.capacity)
    matched = island_prices.price_work(work, fleet.capacity, fleet.memory.work, decision.WARM_STEPS // 3)
    seen = build_input(work, matched, matched.price)
    values = decision.weighted_values(work, PRICED[DEFAULT](seen))
    cleared = prices.find_prices(
        values, work.devices, work.island, fleet.capacity, fleet.memory.devices[0], decision.WARM_STEPS
    )
    instance = rounding.Instance(values, work.devices, work.island, fleet.capacity)
    ours = instance.worth(rounding.assign(instance, cleared).option)
    options, jobs = np.nonzero(values > 0)
    count, columns = values.shape[1], np.arange(len(options))
    entries = np.concatenate((np.ones(len(options)), work.devices[options, jobs]))
    rows = np.concatenate((jobs, count + work.island[options]))
    limits = coo_matrix((entries, (rows, np.tile(columns, 2))), shape=(count + len(fleet.capacity), len(columns)))
    began_s = time.process_time()
    best = linprog(
        -values[options, jobs], A_ub=limits.tocsr(), b_ub=np.concatenate((np.ones(count), fleet.capacity)),
        bounds=(0, 1), method="highs",
    )  # fmt: skip
    took_ms = 1e3 * (time.process_time() - began_s)
    return {"gap_to_lp_percent": 100 * (1 - ours / -best.fun), "highs_lp_ms": took_ms}


def cpu_ms(act: Callable[[], None]) -> float:
    began_s = time.process_time()
    act()
    return 1e3 * (time.process_time() - began_s)


def percentiles(values: list[float]) -> Row:
    return {f"p{share}": float(np.percentile(values, share)) for share in (50, 95, 99)}


if __name__ == "__main__":
    main()
