"""Traces by the recipe of Gavel's generator, from a seed.

A job's type is one of the table's types of one device, all equally likely; it takes 1, 2, 4 or 8 devices (70, 10, 15,
5 %) for 60 * 10^u s on V100s, u from 1.5 to 3 (80 %) or 3 to 4; gaps between arrivals are exponential.
"""

from dataclasses import dataclass

import numpy as np

from orchestrator.simulation.fleets import Fleet, read_fleet
from orchestrator.simulation.traces import Rates, Trace

SIZES, SHARES = (1, 2, 4, 8), (0.70, 0.10, 0.15, 0.05)
KINDS = ("v100", "p100", "k80")


@dataclass(frozen=True)
class Recipe:
    """Devices of each of three kinds, the mean gap between arrivals, and the number of jobs."""

    devices: int
    gap_s: float
    jobs: int

    @property
    def fleet(self) -> Fleet:
        return read_fleet(",".join(f"{kind}={self.devices}" for kind in KINDS))


def make_trace(recipe: Recipe, seed: int, rates: Rates) -> Trace:
    random = np.random.default_rng(seed)
    types = sorted({name for name, size in rates if size == 1})
    rows, arrival_s = [], 0.0
    for job in range(recipe.jobs):
        key = _key(types, rates, random)
        lasts_s = 60 * 10 ** (random.uniform(1.5, 3) if random.random() < 0.8 else random.uniform(3, 4))
        rows.append((arrival_s, job, key[1], float(int(rates[key][0] * lasts_s)), rates[key]))
        arrival_s -= recipe.gap_s * np.log(1 - random.random())
    arrivals_s, ids, gangs, steps, rate = map(np.array, zip(*rows, strict=True))
    return Trace(f"seed {seed}", ids, arrivals_s, gangs, steps, rate.T)


def _key(types: list[str], rates: Rates, random: np.random.Generator) -> tuple[str, int]:
    """Not all types were measured on all numbers of devices."""
    while True:
        key = types[int(random.integers(len(types)))], int(random.choice(SIZES, p=SHARES))
        if key in rates:
            return key
