"""How near `--policy makespan` comes to the earliest possible end, on batches that it was not tuned to.

    python benchmarks/makespans.py FOLDER [-o FILE] [--quick]

FOLDER holds Gavel's `throughputs_isolated.csv`, and may hold `static_12_s0_n300.csv`, on which the policy's parameters
were chosen. Each batch has all jobs at the start, by the recipe of Gavel's generator (parts/gavel_recipe.py) from
another seed. `bound_h` is a linear program (HiGHS): the least time in which all work fits the devices of each kind, if
jobs could be divided among kinds, but not run on two at a time. No schedule is shorter. CPU time of one thread.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

import numpy as np
from parts import machine
from parts.gavel_recipe import KINDS, Recipe, make_trace
from scipy import optimize, sparse

from orchestrator.simulation.fleets import HOUR_S, Fleet, read_fleet
from orchestrator.simulation.replay import replay
from orchestrator.simulation.traces import Trace, read_throughputs, read_trace

TUNED, TUNED_DEVICES = "static_12_s0_n300", 12
BATCHES = (Recipe(12, 0.0, 300), Recipe(12, 0.0, 150), Recipe(36, 0.0, 900))
SEEDS = range(401, 405)
RESTARTS_S = (0.0, 60.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--quick", action="store_true", help="two batches of 40 jobs")
    given = parser.parse_args()
    before, rows = machine.load(), []
    for trace, fleet in _batches(given.folder, given.quick):
        rows.append(_row(trace, fleet))
        sys.stdout.write(_line(rows[-1]) + "\n")
        sys.stdout.flush()
    machine.write({"rows": rows}, given, before)


def _batches(folder: Path, quick: bool) -> list[tuple[Trace, Fleet]]:
    path = folder / "throughputs_isolated.csv"
    recipes = [Recipe(12, 0.0, 40)] if quick else BATCHES
    batches = []
    if (folder / f"{TUNED}.csv").exists() and not quick:
        fleet = read_fleet(",".join(f"{kind}={TUNED_DEVICES}" for kind in KINDS))
        batches.append((read_trace(folder / f"{TUNED}.csv", read_throughputs(path, fleet), fleet), fleet))
    for recipe in recipes:
        rates = read_throughputs(path, recipe.fleet)
        batches += [(make_trace(recipe, seed, rates), recipe.fleet) for seed in (SEEDS[:2] if quick else SEEDS)]
    return batches


def _row(trace: Trace, fleet: Fleet) -> dict[str, Any]:
    row = {"batch": trace.name, "jobs": trace.jobs, "devices_of_each_kind": int(fleet.devices[0])}
    row["bound_h"] = bound_h = bound_s(trace, fleet) / HOUR_S
    for restart_s in RESTARTS_S:
        begun_s = time.process_time()
        replayed = replay(trace, fleet, "makespan", restart_s)
        makespan_h = float(replayed.end_s.max()) / HOUR_S
        row[f"restarts_of_{restart_s:.0f}_s"] = {
            "makespan_h": makespan_h,
            "above_bound_percent": 100 * (makespan_h / bound_h - 1),
            "restarts": len(replayed.stays.job) / trace.jobs,
            "cpu_s": time.process_time() - begun_s,
        }
    return row


def bound_s(trace: Trace, fleet: Fleet) -> float:
    """Return the least time T, with the share of each job's work that each kind does as the other variables."""
    kind, job = np.nonzero(trace.rate)
    takes_s = trace.steps[job] / trace.rate[kind, job]
    column, variables = np.arange(len(job)), len(job) + 1
    time_column = np.full(len(fleet.kinds) + trace.jobs, len(job))
    rows = np.concatenate((kind, len(fleet.kinds) + job, np.arange(len(time_column))))
    columns = np.concatenate((column, column, time_column))
    entries = np.concatenate((takes_s * trace.gang[job], takes_s, -fleet.devices, -np.ones(trace.jobs)))
    within_time = sparse.coo_matrix((entries, (rows, columns)), (len(time_column), variables))
    complete = sparse.coo_matrix((np.ones(len(job)), (job, column)), (trace.jobs, variables))
    least = np.zeros(variables)
    least[-1] = 1.0
    found = optimize.linprog(least, within_time, np.zeros(len(time_column)), complete, np.ones(trace.jobs), (0, None))
    return float(found.fun)


def _line(row: dict[str, Any]) -> str:
    free, costly = (row[f"restarts_of_{restart_s:.0f}_s"] for restart_s in RESTARTS_S)
    return (
        f"{row['batch']:24} {row['jobs']:4} jobs  bound {row['bound_h']:6.1f} h  {free['makespan_h']:6.1f} h "
        f"({free['above_bound_percent']:+z.1f} %)  restarts of 60 s {costly['makespan_h']:6.1f} h "
        f"({costly['above_bound_percent']:+z.1f} %)"
    )


if __name__ == "__main__":
    main()
