"""What the controller costs with many nodes: its share of a core with 1,000 agents and 5,000 attempts.

    python benchmarks/controller.py [-o FILE] [--nodes 1000] [--attempts 5000] [--seconds 60]

The controller, its inbox, threads, launcher, checks of messages, and its store on disk are the real ones; agents are
simulated, in a process of their own (parts/simulated_agents.py), and so is what is asked of Ray. Every agent answers a
watch every 2 s or at news, every attempt reports a step every 2 s and a checkpoint every 60 s, and 10 attempts end and
10 start per second. What Ray takes for its calls is not in the figures.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from parts import machine
from parts.simulated_agents import Habits
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
PATIENCE_S = 900.0
LOOK_EVERY_S = 0.1
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="where the raw figures go, as JSON")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--attempts", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--ends", type=float, default=10, help="attempts that end and start per second")
    parser.add_argument("--profile", type=Path, help="write a profile of the controller's thread here")
    arguments = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="pf-controller-"))
    os.environ["POLYFLEET_HOME"] = str(home)
    try:
        told = measure(home, arguments)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    show(told)
    if arguments.output:
        arguments.output.write_text(json.dumps(told, indent=1) + "\n")


def measure(home: Path, arguments: argparse.Namespace) -> Row:
    from parts.simulated_fleet import Fleet

    before = machine.load()
    fleet = Fleet(home, arguments.nodes, Habits())
    try:
        turns = Turns(fleet.runtime)
        fleet.start()
        began_s, used_s = time.monotonic(), cpu_s()
        until(
            lambda: (
                len(ready := fleet.runtime._agents.ready()) == arguments.nodes
                and all(n.list_requested_s for _, n in ready)
            )
        )
        rows = [{"what": f"{arguments.nodes:,} nodes are known", **since(began_s, used_s)}]
        console.print(rows[-1])
        began_s, used_s = time.monotonic(), cpu_s()
        fleet.submit(arguments.attempts)
        until(lambda: fleet.running() >= arguments.attempts * 0.99)
        rows.append({"what": f"{arguments.attempts:,} jobs at once until they run", **since(began_s, used_s)})
        console.print(rows[-1])
        steady = load(fleet, arguments, turns)
    finally:
        fleet.close()
    return machine.circumstances(arguments, before, home) | {"rows": rows, "steady": steady}


class Turns:
    """Lengths of the controller's turns, without waiting for its inbox; with `profile` also where its time goes."""

    def __init__(self, runtime: Any):
        self.seconds: list[float] = []
        self._turn, runtime._cycle = runtime._cycle, self
        self.profiler: Any = None

    def __call__(self) -> None:
        began_s = time.perf_counter()
        if self.profiler is None:
            self._turn()
        else:
            self.profiler.enable()
            self._turn()
            self.profiler.disable()
        self.seconds.append(time.perf_counter() - began_s)


def load(fleet: Any, arguments: argparse.Namespace, turns: Turns) -> Row:
    """The steady state, with as many new jobs as attempts that end."""
    time.sleep(5.0)
    if arguments.profile:
        import cProfile

        turns.profiler = cProfile.Profile(time.thread_time)
    begun, events, reports = fleet.line.answers, fleet.store.last_seq, fleet.store._writer.last_report
    turns.seconds.clear()
    began_s, used_s, threads = time.monotonic(), cpu_s(), by_thread()
    submitted = 0
    while (elapsed_s := time.monotonic() - began_s) < arguments.seconds:
        due = int(elapsed_s * arguments.ends) - submitted
        if due:
            fleet.submit(due)
            fleet.end(due)
            submitted += due
        time.sleep(LOOK_EVERY_S)
    told = since(began_s, used_s)
    took_s, lengths = told["took_s"], sorted(turns.seconds)
    if arguments.profile:
        turns.profiler.dump_stats(arguments.profile)
    after = by_thread()
    return told | {
        "cores": told["cpu_s"] / took_s,
        "cores_by_thread": {name: (s - threads.get(name, 0.0)) / took_s for name, s in after.items()},
        "running": fleet.running(),
        "answers_per_s": (fleet.line.answers - begun) / took_s,
        "events_per_s": (fleet.store.last_seq - events) / took_s,
        "reports_per_s": (fleet.store._writer.last_report - reports) / took_s,
        "turns_per_s": len(lengths) / took_s,
        "turn_median_s": lengths[len(lengths) // 2],
        "turn_p99_s": lengths[int(len(lengths) * 0.99)],
        "reports_lost": fleet.store.metrics.lost,
    }


def cpu_s() -> float:
    used = psutil.Process().cpu_times()
    return float(used.user + used.system)


def by_thread() -> dict[str, float]:
    """CPU seconds by name without a number; threads of one pool are together."""
    names = {thread.native_id: thread.name.partition("_")[0] for thread in threading.enumerate()}
    found: dict[str, float] = {}
    for thread in psutil.Process().threads():
        name = names.get(thread.id, "other")
        found[name] = found.get(name, 0.0) + thread.user_time + thread.system_time
    return found


def since(began_s: float, used_s: float) -> Row:
    return {"took_s": time.monotonic() - began_s, "cpu_s": cpu_s() - used_s}


def until(reached: Any) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not reached():
        if time.monotonic() > deadline_s:
            raise SystemExit("the controller did not get there")
        time.sleep(LOOK_EVERY_S)


def show(told: Row) -> None:
    steady = told["steady"]
    table = Table("what", "", box=MARKDOWN)
    for row in told["rows"]:
        table.add_row(row["what"], f"{row['took_s']:.1f} s, {row['cpu_s']:.1f} s of CPU")
    table.add_row(f"{steady['running']:,} attempts running: share of a core", f"{steady['cores']:.1%}")
    for name, cores in sorted(steady["cores_by_thread"].items(), key=lambda pair: -pair[1]):
        table.add_row(f"of it: thread {name}", f"{cores:.1%}")
    for name in ("answers", "events", "reports", "turns"):
        table.add_row(f"{name} per second", f"{steady[f'{name}_per_s']:,.0f}")
    table.add_row("a turn: median, p99", f"{steady['turn_median_s'] * 1e3:.1f} ms, {steady['turn_p99_s'] * 1e3:.1f} ms")
    console.print(table)
    console.print(f"load average {told['load_average']}; reports lost {steady['reports_lost']}")


if __name__ == "__main__":
    main()
