"""What it takes to resume from a checkpoint with every byte proved: in one pass, in two, and as it was done before.

    python benchmarks/resume.py FOLDER [-o FILE] [--rounds 9] [--gib 1]

"before" is a node that hashes the whole checkpoint and then a rank that hashes and reads it; "two passes" is the rank
alone; "one pass" hashes while it reads; "unproved" only reads, which is the limit. Every arm fills the same live model,
in turns, in one process. "cold" is dropped from the page cache before. "float32 to bfloat16" is a model of another
dtype, whose values are converted on the way.
"""

import argparse
import copy
import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from time import process_time
from typing import Any

import torch
from checkpoints import drop, touched, transformer
from parts import machine
from parts.samples import Samples, in_turn, ratio
from torch import nn

from workers.checkpoint import load, save, verify

ARMS = ("before", "two passes", "one pass", "unproved")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--pages", nargs="+", default=["warm", "cold"])
    arguments = parser.parse_args()
    root = arguments.folder / "resume"
    shutil.rmtree(root, ignore_errors=True)
    found: dict[str, Any] = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "load_average": {"before": machine.load()},
    }
    try:
        found |= measured(root, arguments.gib, arguments.rounds, arguments.pages)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    found["load_average"]["after"] = machine.load()
    show(found)
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")


def measured(root: Path, gib: float, rounds: int, kinds: list[str]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = transformer(torch.float32, gib)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())  # no value is lost on the way to bfloat16
    saved = save(root, 1, {"model": model})
    samples, cases = Samples(), []
    for into in ("float32", "float32 to bfloat16"):
        live = model if into == "float32" else copy.deepcopy(model).bfloat16()
        cases += [
            case(samples, f"{into}, {pages}: {arm}", Path(saved.path), live, arm, pages == "cold")
            for pages in kinds
            for arm in ARMS
        ]
    for one in cases:
        one()
    samples.clear()  # everybody is warmed up
    in_turn(cases, rounds, lambda told: print(told, flush=True), "resume")
    names = [f"{into}, {pages}" for into in ("float32", "float32 to bfloat16") for pages in kinds]
    found = [(name, clock) for name in names for clock in ("", ", CPU")]
    rows = {f"{name}: {arm}{clock}": samples.row(f"{name}: {arm}{clock}") for name, clock in found for arm in ARMS}
    compared = [
        ratio(rows[f"{name}: one pass{clock}"], rows[f"{name}: {arm}{clock}"])
        for name, clock in found
        for arm in ARMS
        if arm != "one pass"
    ]
    return {"bytes": saved.bytes, "rows": list(rows.values()), "ratios": compared}


def case(samples: Samples, name: str, folder: Path, live: nn.Module, arm: str, cold: bool) -> Callable[[], None]:
    shards = sorted(folder.glob("*.safetensors"))

    def run() -> None:
        (drop if cold else touched)(shards)
        cpu_s = process_time()
        with samples.timing(name):
            if arm == "before":
                assert verify(folder)["ok"]
            proof = {"one pass": "once", "unproved": "none"}.get(arm, "chunks")
            load(folder, {"model": live}, verify=proof, on_lossy="warn")
        samples.add(f"{name}, CPU", process_time() - cpu_s)

    return run


def show(found: dict[str, Any]) -> None:
    print(f"\n{found['bytes'] / 2**30:.2f} GiB")
    for row in found["rows"]:
        print(
            f"{row['case']:42s} {row['median_s']:7.3f} s [{row['low_s']:.3f}, {row['high_s']:.3f}]  {row['n']} samples"
        )
    for one in found["ratios"]:
        print(
            f"{one['theirs']:42s} {one['ratio']:5.2f} x one pass [{one['low']:.2f}, {one['high']:.2f}] {one['verdict']}"
        )


if __name__ == "__main__":
    main()
