"""How long looking at this machine's devices takes, in processes of their own that start in turn.

    python benchmarks/inventory.py [-o FILE] [--rounds 20]

The peer is what most programs do to learn of devices: `import torch` and torch.cuda.is_available(). The limit is a
Python that does nothing. Seconds are those after the interpreter started (told by the child) and of the whole process.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from parts import machine
from parts.samples import Samples, in_turn, ratio
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from orchestrator.units import duration
from workers.devices.discovery import discover

CHILD = "from time import perf_counter\nstart = perf_counter()\n{}\nprint(perf_counter() - start)"
CASES = {
    "discover": ("discover(): devices and findings", "from workers.devices.discovery import discover; discover()"),
    "detect": (
        "HardwareDetector().detect(): the same as a profile",
        "from workers.devices.capability.hardware import HardwareDetector; HardwareDetector().detect()",
    ),
    "torch": ("import torch; torch.cuda.is_available()", "import torch; torch.cuda.is_available()"),
    "python": ("Python that does nothing", "pass"),
}
PEER, LIMIT = "torch", "python"
console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)


def main() -> None:
    arguments = parse()
    before = machine.load()
    inside, whole = Samples(), Samples()
    say = partial(Console(stderr=True, highlight=False).print, style="dim")
    run_once(
        Samples(), Samples(), PEER
    )  # torch's files come into the page cache; its first import is not the peer's fault
    in_turn([partial(run_once, inside, whole, case) for case in CASES], arguments.rounds, say, "inventory")
    found = report(inside, whole, before)
    show(found)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="where the raw samples go, as JSON")
    parser.add_argument("--rounds", type=int, default=20)
    return parser.parse_args()


def run_once(inside: Samples, whole: Samples, case: str) -> None:
    start = perf_counter()
    done = subprocess.run(
        [sys.executable, "-P", "-c", CHILD.format(CASES[case][1])], stdout=subprocess.PIPE, text=True, check=True
    )
    whole.add(case, perf_counter() - start)
    inside.add(case, float(done.stdout.split()[-1]))


def report(inside: Samples, whole: Samples, before: list[float]) -> dict[str, Any]:
    devices, findings = discover()
    rows = {
        case: {"what": what, "inside": inside.row(case), "process": whole.row(case)}
        for case, (what, _) in CASES.items()
    }
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(Path(tempfile.gettempdir())),
        "load_average": {"before": before, "after": machine.load()},
        "devices": [device.kind for device in devices],
        "findings": [finding.message for finding in findings],
        "rows": list(rows.values()),
        "ratios": [ratio(rows[ours]["process"], rows[PEER]["process"]) for ours in ("discover", "detect")],
        "times_of_limit": rows["discover"]["process"]["median_s"] / rows[LIMIT]["process"]["median_s"],
    }


def show(found: dict[str, Any]) -> None:
    table = Table(box=MARKDOWN)
    for column in ("what", "after interpreter start", "95 % interval", "whole process", "95 % interval", "n"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in found["rows"]:
        times = [text for part in ("inside", "process") for text in _median(row[part])]
        table.add_row(row["what"], *times, str(row["process"]["n"]))
    console.print(table)
    for r in found["ratios"]:
        told = f"{r['theirs']} takes {r['ratio']:.2g} times as long as {r['ours']} ({r['low']:.2g} to {r['high']:.2g})"
        console.print(f"{told}: {r['verdict']}")
    console.print(f"devices {found['devices']}; load {found['load_average']}")


def _median(row: dict[str, Any]) -> tuple[str, str]:
    return duration(row["median_s"]), f"{duration(row['low_s'])} – {duration(row['high_s'])}"


if __name__ == "__main__":
    main()
