"""What a node takes to start an attempt and to end it: by its zygote, and by an interpreter for each supervisor.

    python benchmarks/starts.py [-o FILE] [--rounds 30] [--jobs 60]

Real attempts of the command `true` under real supervisors, without server and Ray. The limit is a process that runs
`true`, and the peer a bare `python -S -c pass`, which is what each supervisor was before it did anything.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

from parts import machine
from parts.samples import Samples, in_turn
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from orchestrator.units import duration
from workers.attempt.attempts import AttemptManager
from workers.attempt.supervisor_launcher import SupervisorLauncher
from workers.protocol.messages import Order
from workers.storage.code_archives import NodeCodeArchives

WAYS = {"zygote": "forked by the zygote", "interpreter": "an interpreter each"}
STAGES = {"start": "asked to start → its supervisor is on record", "end": "asked to start → its end is known"}
BARE = {"python": "`python -S -c pass` as a process", "true": "`true` as a process"}
console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)


class Node:
    """Attempts without an agent around them."""

    def __init__(self, home: Path, way: str):
        self.way, self._starter, self._numbers = way, SupervisorLauncher(), count()
        if way == "zygote":
            self._starter.start()
        packages = NodeCodeArchives(home / way / "packages")
        folder, storage = home / way / "attempts", home / way / "storage"
        self._attempts = AttemptManager(folder, storage, "n", packages, lambda _: 1, None, self._starter)

    def close(self) -> None:
        self._starter.close()

    def start(self, command: Sequence[str] = ("true",)) -> str:
        job = f"j{next(self._numbers)}"
        order = Order(job, 1, "run", "cpu", "cpu", False, (0,), 0, 1, 0, 1, 1, "127.0.0.1", 1, command=tuple(command))
        self._attempts.start(order, {})
        return job

    def ended(self, live: set[str], known: dict[str, str]) -> set[str]:
        """Those of `live` that have ended by now, at least one of them. They are forgotten."""
        done: set[str] = set()
        while not done:
            for report in self._attempts.wait_for_changes({}, known, 60.0):
                known[f"{report.job}.1.0"] = report.phase
                if report.phase == "ended" and report.job in live:
                    done.add(report.job)
        for job in done:
            self._attempts.remove_rank_files(job, 1)
        return done

    def one(self, samples: Samples, command: Sequence[str] = ("true",)) -> None:
        began = perf_counter()
        job = self.start(command)
        samples.add(f"{self.way}.start", perf_counter() - began)
        self.ended({job}, {})
        samples.add(f"{self.way}.end", perf_counter() - began)

    def rate(self, jobs: int, at_once: int) -> float:
        """Attempts per second, each started by a call of its own."""
        began, left, live, known = perf_counter(), jobs, set[str](), dict[str, str]()
        with ThreadPoolExecutor(at_once) as threads:
            while left or live:
                more = min(left, at_once - len(live))
                live |= {asked.result() for asked in [threads.submit(self.start) for _ in range(more)]}
                left -= more
                live -= self.ended(live, known)
        return jobs / (perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=60, help="of each measured rate")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="polyfleet-starts-") as folder:
        found = measure(Path(folder), words.rounds, words.jobs)
    show(found)
    if words.output:
        words.output.write_text(json.dumps(found, indent=1) + "\n")


def measure(home: Path, rounds: int, jobs: int) -> dict[str, Any]:
    samples, before, rates = Samples(), machine.load(), dict[str, list[float]]()
    nodes = [Node(home, way) for way in WAYS]
    try:
        for node in nodes:
            node.one(Samples())
        bare = {"python": [sys.executable, "-S", "-c", "pass"], "true": ["true"]}
        cases: list[Callable[[], None]] = [partial(node.one, samples) for node in nodes]
        cases += [partial(process, samples, name, command) for name, command in bare.items()]
        in_turn(cases, rounds, console.log, "starts")
        for at_once in (1, 2, 4):
            for node in (*nodes, *reversed(nodes)):
                rates.setdefault(f"{node.way}.{at_once}", []).append(node.rate(jobs, at_once))
    finally:
        for node in nodes:
            node.close()
    whats = {f"{way}.{stage}": f"{text}; {how}" for way, how in WAYS.items() for stage, text in STAGES.items()} | BARE
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(home),
        "load_average": {"before": before, "after": machine.load()},
        "rows": [{"what": what, **samples.row(case)} for case, what in whats.items()],
        "rates": [{"case": case, "attempts_per_s": [round(rate, 1) for rate in told]} for case, told in rates.items()],
    }


def process(samples: Samples, name: str, command: list[str]) -> None:
    with samples.timing(name):
        subprocess.run(command, check=True)


def show(found: dict[str, Any]) -> None:
    table = Table(box=MARKDOWN)
    for column in ("what", "median", "interval", "minimum", "n"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in found["rows"]:
        interval = f"{duration(row['low_s'])} – {duration(row['high_s'])}"
        table.add_row(row["what"], duration(row["median_s"]), interval, duration(row["min_s"]), str(row["n"]))
    console.print(table)
    for row in found["rates"]:
        way, _, at_once = row["case"].partition(".")
        console.print(f"{WAYS[way]}, {at_once} at a time: {row['attempts_per_s']} attempts/s")
    console.print(f"load {found['load_average']}")


if __name__ == "__main__":
    main()
