"""How long a whole plan takes, with its rules, nodes and sentences: by order, and by the decision on arrays.

    python benchmarks/plans.py [-o json | -o FILE] [--rounds 20] [--quick]

Fleets of nodes with eight devices of one of eight kinds, nine of ten devices busy, and waiting jobs of forty different
Fleets of nodes with eight devices of one of eight kinds, nine of ten devices busy, and waiting jobs of forty shapes
of 1, 2, 4 or 8 devices. A server starts at most a hundred jobs with one plan, and so does this. The rounds of all
"""

import argparse
import json
import os
import random
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

import numpy as np
from parts import machine

from orchestrator.core.model import Candidate, DeclaredWork, Devices, Job, Running, Snapshot
from orchestrator.core.plan.plan import plan
from orchestrator.core.step.placement import MAX_STARTS

KINDS, SHAPES, NODE = 8, 40, 8
COUNTS = (1, 1, 1, 2, 4, 8)
BUSY = 0.9
WAYS = {"order": ("priority", False), "fill": ("finish_time", False), "full": ("finish_time", True)}
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", default="json", help="json: only the last line; else a file for all figures")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="small fleets, two rounds")
    given = parser.parse_args()
    found = measured(given)
    if given.output != "json":
        Path(given.output).write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(json.dumps(found, separators=(",", ":")) + "\n")


def measured(given: argparse.Namespace) -> Row:
    rounds, smaller = (2, 10) if given.quick else (given.rounds, 1)
    before = machine.load()
    sizes = {
        "200 nodes, 2000 jobs": (200, 2000),
        "1250 nodes, 2048 jobs": (1250, 2048),
        "1250 nodes, 10000 jobs": (1250, 10_000),
        "1250 nodes, 100000 jobs": (1250, 100_000),
    }
    rows = {name: row(nodes // smaller, jobs // smaller, rounds) for name, (nodes, jobs) in sizes.items()}
    large = rows["1250 nodes, 2048 jobs"]
    key = {f"{way}_ms_p50": large[way]["p50"] for way in WAYS}
    return {**key, "fleets": rows, **machine.circumstances(given, before)}


def row(nodes: int, jobs: int, rounds: int) -> Row:
    seen = snapshot(nodes, jobs)
    warm = {way: replace(seen, policy=policy, memory=plan(replace(seen, policy=policy), full=True).memory)
            for way, (policy, _) in WAYS.items()}  # fmt: skip
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for way, (_, full) in WAYS.items():
            began_s = time.process_time()
            plan(warm[way], full=full, most=MAX_STARTS)
            times[way].append(1e3 * (time.process_time() - began_s))
    return {way: {f"p{share}": float(np.percentile(times[way], share)) for share in (50, 95)} for way in WAYS}


def snapshot(nodes: int, jobs: int) -> Snapshot:
    chance = random.Random(0)
    devices, running = [], []
    for number in range(nodes):
        kind, node = f"nvidia:K{number % KINDS}", f"n{number:05}"
        held = [index for index in range(NODE) if chance.random() < BUSY]
        free = tuple(index for index in range(NODE) if index not in held)
        devices.append(
            Devices(f"{node}/{kind}", node, f"p{number % KINDS}", "env", "nvidia", kind, free, NODE, 80 << 30)
        )
        running += [Running(f"r{number}-{index}", 0, index, ((f"{node}/{kind}", (index,)),)) for index in held]
    return Snapshot(0.0, tuple(devices), tuple(job(number) for number in range(jobs)), tuple(running))


def job(number: int) -> Job:
    shape = number % SHAPES
    kinds = tuple(f"nvidia:K{(shape + other) % KINDS}" for other in range(1 + shape % 3))
    count = COUNTS[shape % len(COUNTS)]
    want = Candidate(kinds, count, count, memory_bytes=(shape % 7) << 30)
    work = DeclaredWork(hours=1.0 + shape, on=kinds[0])
    return Job(f"j{number}", f"j{number}", "train", (want,), number=number + 1, work=work)


if __name__ == "__main__":
    main()
