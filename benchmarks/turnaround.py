"""What the server and Ray add to a job on its node: the first output after a submit, and jobs that wait for a device.

    python benchmarks/turnaround.py [-o FILE] [--jobs 40] [--rounds 5] [--devices 1 2 4]

For each number of devices a fleet with one `cpu` node. A device's cycle is the time from the first output of a job to
that of the next, while many wait; the bare cycle is that of the same command under the same supervisor, started by the
same zygote, one after the other without server and Ray, in the same rounds. Their difference is the turnaround.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import contextmanager
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

from parts import machine
from parts.jobs import NO_OP, Jobs
from parts.samples import Samples
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from starts import Node

from orchestrator.client import client as server
from orchestrator.units import duration

CLI = str(Path(sys.executable).with_name("polyfleet"))
WARM_UP = 3
LOOK_EVERY_S = 0.1
"""At the end of many jobs: whoever asks at each of their events has the server answer for most of its time."""

console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="where the raw figures go, as JSON")
    parser.add_argument("--jobs", type=int, default=40, help="that wait at once, in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--singles", type=int, default=10, help="jobs on an idle fleet, in each round")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4])
    arguments = parser.parse_args()
    before, rows = machine.load(), []
    for devices in arguments.devices:
        with fleet(devices) as home:
            rows += one_fleet(home, devices, arguments)
    told = machine.circumstances(arguments, before) | {"rows": rows}
    show(told)
    if arguments.output:
        arguments.output.write_text(json.dumps(told, indent=1) + "\n")


@contextmanager
def fleet(devices: int) -> Any:
    """A fleet of one node with so many devices, in a home of its own; nothing stays."""
    home = Path(tempfile.mkdtemp(prefix="pf-turns-"))
    os.environ["POLYFLEET_HOME"] = str(home)
    file = home / "fleet.yaml"
    file.write_text(f"name: turns\npools:\n  cpu: {{backend: cpu, nodes: 1, devices: {devices}}}\n")
    try:
        subprocess.run([CLI, "up", "--file", str(file)], check=True, stdout=subprocess.DEVNULL)
        yield home
    finally:
        subprocess.run([CLI, "down"], check=False, stdout=subprocess.DEVNULL)
        shutil.rmtree(home, ignore_errors=True)


def one_fleet(home: Path, devices: int, arguments: argparse.Namespace) -> list[Row]:
    """Single jobs, waiting jobs and the bare chain in turn."""
    samples, rates, cycles, node = Samples(), [], list[float](), Node(home / "bare", "zygote")
    try:
        with Jobs(samples) as jobs:
            for _ in range(WARM_UP):
                jobs.one("warm up")
                node.one(Samples(), NO_OP["command"])
            for number in range(arguments.rounds):
                console.print(f"{devices} devices: round {number + 1} of {arguments.rounds}", style="dim")
                for _ in range(arguments.singles):
                    jobs.one("single")
                for _ in range(arguments.singles):
                    with samples.timing("bare"):
                        node.one(Samples(), NO_OP["command"])
                rate, gaps = waiting(jobs, arguments.jobs)
                rates.append(rate)
                cycles += gaps
    finally:
        node.close()
    for gap_s in cycles:
        samples.add("cycle", gap_s)
    what = f"{devices} device{'s' if devices > 1 else ''}: "
    named = {
        "single.acknowledged": "submit → acknowledged",
        "single.running": "submit → its command runs",
        "single.done": "submit → done",
        "cycle": "one device, jobs waiting: from one's first output to the next one's",
        "bare": "the same command under a supervisor, without server and Ray: start → end known",
    }
    rows = [samples.row(case) | {"what": what + text} for case, text in named.items()]
    by_case = {row["case"]: row for row in rows}
    turnaround_s = by_case["cycle"]["median_s"] - by_case["bare"]["median_s"]
    return [*rows, {"what": what + "jobs per second", "rates": rates, "turnaround_s": turnaround_s}]


def waiting(jobs: Jobs, count: int) -> tuple[float, list[float]]:
    """Jobs per second, and the cycles of every device, of jobs that are submitted at once."""
    client = server.connect()
    try:
        began_s = perf_counter()
        ids = [
            row["id"]
            for row in client.jobs.submit_many([{"spec": NO_OP, "code_archive": ""} for _ in range(count)])["jobs"]
        ]
        jobs.until_finished(set(ids), LOOK_EVERY_S)
        rate, printed = count / (perf_counter() - began_s), defaultdict(list)
        for job in ids:
            line = client.jobs.logs(job)["lines"][0]["time"]
            placed = next(e for e in client.jobs.history(job) if e["event"] == "placed")
            printed[str(placed["data"]["allocations"])].append(datetime.fromisoformat(line))
    finally:
        client.close()
    gaps: list[timedelta] = []
    for times in printed.values():
        times.sort()
        gaps += [later - earlier for earlier, later in pairwise(times)]
    return rate, [gap.total_seconds() for gap in gaps]


def show(told: Row) -> None:
    table = Table(box=MARKDOWN)
    for column in ("what", "median", "95 % interval", "n"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in told["rows"]:
        if "rates" in row:
            rates = sorted(row["rates"])
            spread = f"{rates[0]:.1f} – {rates[-1]:.1f}"
            table.add_row(row["what"], f"{rates[len(rates) // 2]:.1f}", spread, str(len(rates)))
            table.add_row(row["what"].replace("jobs per second", "turnaround"), duration(row["turnaround_s"]), "", "")
        else:
            interval = f"{duration(row['low_s'])} – {duration(row['high_s'])}"
            table.add_row(row["what"], duration(row["median_s"]), interval, str(row["n"]))
    console.print(table)
    console.print(f"load average {told['load_average']}")


if __name__ == "__main__":
    main()
