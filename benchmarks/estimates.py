"""Whether estimated rates choose better devices than no number does: leave-one-out on a table of measured rates.

    python benchmarks/estimates.py GAVEL [-o FILE]

GAVEL is a folder with Gavel's throughputs_isolated.csv: rates of 83 (job type, gang) on three kinds. For each job type
of one device, one kind is held out; one or both of the others are known. Of the other job types a share is known on all
kinds (drawn from a seed, twenty times): of all models, or of other models only, since Gavel has some models at several
batch sizes. `regret`: how much faster the fastest kind is than the chosen one, by
choosing the best measured kind (`no_number`, what the planner does without estimates) and by choosing the fastest with
the estimate. `error` is the factor between estimate and truth, `covered` how often the truth lies in the interval.
`figures` is the same from published figures alone, from the faster of the kinds that are known; no others are needed.
Rates of 0 mean that a job cannot run there, and are left out. The last line of stdout is one compact JSON object.
"""

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from parts import machine

from cluster.catalogue import lookup
from orchestrator.core.plan.arrays.completion import estimate_rates

KINDS = ("v100", "p100", "k80")
FIGURES = ((900.0, 15.7), (732.2, 10.61), (240.0, 4.37))
"""Memory bandwidth in GB/s and fp32 TFLOPS, as the catalogue has them; of one of a K80's two GPUs as NVIDIA's board
specification (BD-07317-001) has them.
"""
SHARES = (0.1, 0.2, 0.3, 0.6, 0.9)
DRAWS = 20
WAYS = ("no_number", "estimate")
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", default="")
    given = parser.parse_args()
    before = machine.load()
    rates, models = table(given.folder / "throughputs_isolated.csv")
    cases = [
        case(rates, models, known, share, apart) for apart in (False, True) for known in (1, 2) for share in SHARES
    ]
    figures = [by_figures(rates, known) for known in (1, 2)]
    found = {"job_types": len(rates), "cases": cases, "figures": figures, **machine.circumstances(given, before)}
    if given.output:
        Path(given.output).write_text(json.dumps(found, indent=1, default=str) + "\n")
    sys.stdout.write(json.dumps(found, separators=(",", ":"), default=str) + "\n")


def table(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(job types, kinds), steps per second on one device, of job types that run on all kinds; and the model of each."""
    with path.open(newline="") as file:
        alone = [row for row in csv.DictReader(file) if row["scale_factor"] == "1"]
    rates = np.array([[float(row[f"{kind}_steps_per_s"]) for kind in KINDS] for row in alone])
    models = np.array([row["job_type"].partition(" (")[0] for row in alone])
    runs = (rates > 0).all(axis=1)
    return rates[runs], models[runs]


def case(rates: np.ndarray, models: np.ndarray, known: int, share: float, apart: bool) -> Row:
    """`known` of the two other kinds of each job type; `apart`: none of its own model is among the others."""
    chance = np.random.default_rng(0)
    told = []
    for _ in range(DRAWS):
        for row in range(len(rates)):
            for held_out in range(len(KINDS)):
                usable = (models != models[row]) if apart else (np.arange(len(rates)) != row)
                others = np.flatnonzero((chance.random(len(rates)) < share) & usable)
                kinds = chance.permutation([kind for kind in range(len(KINDS)) if kind != held_out])[:known]
                told.append(one(rates, row, held_out, kinds, others))
    estimated = [line for line in told if line["error"] is not None]
    return {
        "other_models_only": apart,
        "known_kinds": known,
        "share_of_others": share,
        "other_job_types": float(np.mean([line["others"] for line in told])),
        "estimated_percent": 100 * len(estimated) / len(told),
        "median_error_factor": float(np.exp(np.median([line["error"] for line in estimated]))),
        "covered_percent": 100 * float(np.mean([line["covered"] for line in estimated])),
        "mean_regret_percent": {way: 100 * float(np.mean([line[way] for line in estimated])) for way in WAYS},
    }


def by_figures(rates: np.ndarray, known: int) -> Row:
    told = []
    for row in rates:
        for held_out in range(len(KINDS)):
            others = [kind for kind in range(len(KINDS)) if kind != held_out]
            for kinds in [others] if known == 2 else [[kind] for kind in others]:
                told.append(guessed(row, held_out, max(kinds, key=lambda kind: row[kind])))
    return {
        "known_kinds": known,
        "median_error_factor": float(np.exp(np.median([line["error"] for line in told]))),
        "covered_percent": 100 * float(np.mean([line["covered"] for line in told])),
        "mean_regret_percent": {way: 100 * float(np.mean([line[way] for line in told])) for way in WAYS},
    }


def guessed(row: np.ndarray, held_out: int, best: int) -> Row:
    ratio = lookup.figures_ratio(FIGURES[held_out], FIGURES[best])
    assert ratio is not None
    guess, fastest = row[best] * ratio, max(row[best], row[held_out])
    error = abs(np.log(guess / row[held_out]))
    chosen = held_out if guess > row[best] else best
    return {
        "error": float(error),
        "covered": bool(error <= np.log(lookup.SPEED_ERROR_FACTOR)),
        "no_number": float(fastest / row[best] - 1),
        "estimate": float(fastest / row[chosen] - 1),
    }


def one(rates: np.ndarray, row: int, held_out: int, kinds: np.ndarray, others: np.ndarray) -> Row:
    seen = np.full((len(others) + 1, len(KINDS)), np.nan)
    seen[:-1], seen[-1, kinds] = rates[others], rates[row, kinds]
    found = estimate_rates(seen, max_measured=2)
    guess, truth = found.rate[-1, held_out], rates[row, held_out]
    there = [*kinds.tolist(), held_out]
    fastest = max(rates[row, there])
    best_known = kinds[int(np.argmax(rates[row, kinds]))]
    chosen = held_out if guess > rates[row, best_known] else best_known
    return {
        "others": len(others),
        "error": None if np.isnan(guess) else float(abs(np.log(guess / truth))),
        "covered": bool(found.low[-1, held_out] <= truth <= found.high[-1, held_out]),
        "no_number": float(fastest / rates[row, best_known] - 1),
        "estimate": float(fastest / rates[row, chosen] - 1),
    }


if __name__ == "__main__":
    main()
