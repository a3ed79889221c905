"""The mean and the longest times, as TAIL of finish_time.py is chosen: on traces by the recipe of Gavel's generator.

    python benchmarks/tails.py FOLDER [-o FILE] [--tails 0,0.2] [--quick]

FOLDER holds Gavel's `throughputs_isolated.csv`; parts/gavel_recipe.py has the recipe. What came into question for TAIL
was chosen on the traces `first`; `second` decided between 0.2 and 0.3; `unseen` was not run before all was chosen.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

import numpy as np
from parts import machine
from parts.gavel_recipe import Recipe, make_trace

from orchestrator.core.plan.policies import finish_time
from orchestrator.simulation.fleets import HOUR_S, Fleet
from orchestrator.simulation.replay import replay
from orchestrator.simulation.traces import Trace, read_throughputs

TAILS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
FIGURES = ("window_mean_h", "mean_h", "p99_h", "longest_h", "restarts")


RECIPES = [Recipe(12, 3600, 400)] * 4 + [
    Recipe(12, 4200, 400),
    Recipe(12, 3300, 400),
    Recipe(36, 1440, 600),
    Recipe(36, 1200, 600),
]
FIRST_SEED = {"first": 101, "second": 201, "unseen": 301}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--tails", default=",".join(map(str, TAILS)))
    parser.add_argument("--quick", action="store_true", help="two traces of 40 jobs of each set")
    given = parser.parse_args()
    before, found = machine.load(), []
    for name in FIRST_SEED:
        rows = [row(given, name, float(tail)) for tail in given.tails.split(",")]
        for each in rows:
            each["against_the_first"] = {key: _ratio(each[key], rows[0][key]) for key in FIGURES}
            sys.stdout.write(_line(each) + "\n")
        found += rows
    machine.write({"rows": found, "traces": [vars(recipe) for recipe in RECIPES]}, given, before)


def row(given: argparse.Namespace, name: str, tail: float) -> dict[str, Any]:
    """Of each trace the figures, with the policy `finish_time` and restarts for nothing."""
    finish_time.TAIL = tail
    runs, some = [], [replace(recipe, jobs=40) for recipe in RECIPES[:2]] if given.quick else RECIPES
    for seed, recipe in enumerate(some, FIRST_SEED[name]):
        rates = read_throughputs(given.folder / "throughputs_isolated.csv", recipe.fleet)
        runs.append(figures(make_trace(recipe, seed, rates), recipe.fleet))
    return {"set": name, "tail": tail, **{figure: [run[figure] for run in runs] for figure in FIGURES}}


def figures(trace: Trace, fleet: Fleet) -> dict[str, float]:
    replayed = replay(trace, fleet, "finish_time")
    jct_h = (replayed.end_s - trace.arrival_s) / HOUR_S
    jobs = trace.jobs
    return {
        "window_mean_h": float(jct_h[jobs // 4 : 3 * jobs // 4].mean()),
        "mean_h": float(jct_h.mean()),
        "p99_h": float(np.percentile(jct_h, 99)),
        "longest_h": float(np.sort(jct_h)[-jobs // 100 :].mean()),
        "restarts": len(replayed.stays.job) / jobs,
    }


def _ratio(these: list[float], first: list[float]) -> float:
    """The geometric mean over the traces."""
    return float(np.exp(np.mean(np.log(np.array(these) / np.array(first)))))


def _line(row: dict[str, Any]) -> str:
    told = "  ".join(f"{name} {100 * (ratio - 1):+.1f} %" for name, ratio in row["against_the_first"].items())
    return f"{row['set']:7} TAIL {row['tail']:.2f}  {told}"


if __name__ == "__main__":
    main()
