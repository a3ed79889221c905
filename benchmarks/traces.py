"""The policies on traces of jobs, in virtual time, beside the figures that Gavel's own simulator gave for its policies.

    python benchmarks/traces.py FOLDER [-o FILE] [--only NAME] [--controller]

FOLDER holds Gavel's traces and rates as CSV (docs/guides/simulate.md has their form, docs/performance/scheduling.md
where they come from), and `gavel_results.json`. Each run is `polyfleet simulate`'s own code; CPU time of one thread.
With --controller the whole controller plans, on nodes of 4 and of 12 devices.
"""

import argparse
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

from parts import machine

from orchestrator.simulation.controller_replay import on_nodes, replay_controlled
from orchestrator.simulation.fleets import read_fleet
from orchestrator.simulation.outcome import outcome
from orchestrator.simulation.replay import replay
from orchestrator.simulation.traces import read_throughputs, read_trace, read_window

TWELVE, THIRTY_SIX = "v100=12,p100=12,k80=12", "v100=36,p100=36,k80=36"
FLEETS = {
    "contmulti_12_lam3600_s0_n400": (TWELVE, "100:300"),
    "contmulti_12_lam4800_s0_n400": (TWELVE, "100:300"),
    "contmulti_36_lam1440_s0_n600": (THIRTY_SIX, "150:450"),
    "contmulti_36_lam1440_s0_n3000": (THIRTY_SIX, "1000:2000"),
    "contsingle_36_lam720_s0_n900": (THIRTY_SIX, "250:650"),
    "static_12_s0_n300": (TWELVE, ""),
    "physical_max_min_fairness": ("v100=8,p100=16,k80=24", ""),
    "physical_minimize_makespan": ("v100=8,p100=16,k80=24", ""),
}
MORE = {"contmulti_12_lam3600_s0_n400": ("fifo", "max_min_fairness", "makespan", "cost")}
NOISE_SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Rules:
    policy: str
    restart_s: float = 0.0
    noise: float = 0.0
    seed: int = 0
    per_node: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--only", default="", help="traces whose name begins so")
    parser.add_argument("--controller", action="store_true")
    given = parser.parse_args()
    before, rows = machine.load(), []
    for name in (name for name in FLEETS if name.startswith(given.only)):
        for rules in _controlled(name) if given.controller else _runs(name):
            rows.append(row(given.folder, name, rules))
            sys.stdout.write(_line(rows[-1]) + "\n")
            sys.stdout.flush()
    machine.write({"rows": rows}, given, before)


def _runs(name: str) -> list[Rules]:
    runs = [Rules("finish_time"), Rules("finish_time", restart_s=60.0)]
    if name.startswith("static"):
        runs += [Rules("makespan"), Rules("makespan", restart_s=60.0)]
    if name in MORE:
        runs += [Rules(policy) for policy in MORE[name]]
        runs += [Rules("finish_time", noise=0.5, seed=seed) for seed in NOISE_SEEDS]
    return runs


def _controlled(name: str) -> list[Rules]:
    restarts = (0.0, 60.0) if name.startswith("contmulti_12") else (60.0,)
    policies = ("finish_time", "makespan") if name.startswith("static") else ("finish_time",)
    return [Rules(policy, s, per_node=size) for policy in policies for s in restarts for size in (12, 4)]


def row(folder: Path, name: str, rules: Rules) -> dict[str, Any]:
    text, window = FLEETS[name]
    fleet = read_fleet(text)
    trace = read_trace(folder / f"{name}.csv", read_throughputs(folder / "throughputs_isolated.csv", fleet), fleet)
    began_cpu_s = time.process_time()
    if rules.per_node:
        fleet = on_nodes(fleet, rules.per_node)
        replayed = replay_controlled(trace, fleet, rules.policy, rules.restart_s)
    else:
        replayed = replay(trace, fleet, rules.policy, rules.restart_s, rules.noise, rules.seed)
    cpu_s = time.process_time() - began_cpu_s
    found = outcome(trace, fleet, rules.policy, replayed, read_window(window, trace) if window else None)
    return {"trace": name, **asdict(rules), "cpu_s": cpu_s, **found}


def _line(row: dict[str, Any]) -> str:
    mean_h = row.get("window_mean_jct_h", row["mean_jct_h"])
    bound = mean_h / row.get("window_isolated_mean_h", row["isolated_mean_h"])
    return (
        f"{row['trace']:32} {row['policy']:16} nodes of {row['per_node']:2} +{row['restart_s']:2.0f} s  "
        f"noise {row['noise']:.1f}  "
        f"window mean {mean_h:6.2f} h = {bound:.3f} x alone  p99 {row['p99_jct_h']:6.1f} h  "
        f"makespan {row['makespan_h']:7.1f} h  restarts {row['restarts']:.2f}  "
        f"ratio {row['worst_finish_time_ratio']:.2f}  {row['cpu_s']:.1f} s"
    )


if __name__ == "__main__":
    main()
