"""What a client waits for while others hold 300 idle streams and 1,500 idle connections to the same server.

    python benchmarks/server_load.py [-o FILE] [--rounds 6] [--calls 200] [--streams 300] [--idle 1500]

One fleet of one CPU node with a job that sleeps; everything on loopback and on this machine. Rounds without and with
the load take turns; the load is a process of its own, opened before its round and gone after it. The limit is the same
call without anybody else. Each round ends by itself.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
from parts import machine
from parts.limits import command
from parts.samples import Samples
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from cluster.host import tokens
from orchestrator import Orchestrator, RunJob
from orchestrator.client import client as server
from orchestrator.home import daemon
from orchestrator.home.server_record import ServerRecord
from orchestrator.units import duration

CLI = str(Path(sys.executable).with_name("polyfleet"))
LOAD = Path(__file__).with_name("parts") / "idle_load.py"
CASES = {"jobs": "GET /v1/jobs", "nodes": "GET /v1/nodes", "new": "GET /v1/jobs, new connection"}
console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)


def main() -> None:
    arguments = parse()
    before, found = machine.load(), {"alone": Samples(), "beside": Samples()}
    with fleet() as home:
        running, job = daemon.find_server(home), sleeping()
        assert running is not None
        held = {}
        for number in range(arguments.rounds):
            Console(stderr=True).print(f"round {number + 1} of {arguments.rounds}", style="dim")
            for case in sorted(found, reverse=bool(number % 2)):
                with load(running, home, job, arguments) if case == "beside" else nullcontext():
                    ask(home, found[case], arguments.calls)
                    held = state_of(running) if case == "beside" else held
    told = report(found, before, arguments, held)
    show(told)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(told, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="where the raw samples go, as JSON")
    parser.add_argument("--rounds", type=int, default=6, help="of each, without and with the load")
    parser.add_argument("--calls", type=int, default=200, help="of each kind in a round")
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--idle", type=int, default=1500, help="connections that say nothing")
    return parser.parse_args()


@contextmanager
def fleet() -> Iterator[Path]:
    """Of a home of its own; nothing stays."""
    home = Path(tempfile.mkdtemp(prefix="pf-load-"))
    os.environ["POLYFLEET_HOME"] = str(home)
    try:
        daemon.start_server(home, 0)
        command(Samples(), "up", [CLI, "up"])
        yield home
    finally:
        command(Samples(), "down", [CLI, "down"])
        shutil.rmtree(home, ignore_errors=True)


def sleeping() -> str:
    """A job that runs and prints nothing, for as long as the benchmark."""
    with Orchestrator.connect() as o:
        return o.submit(RunJob(name="sleeps", command="sleep 3600")).id


@contextmanager
def load(running: ServerRecord, home: Path, job: str, arguments: argparse.Namespace) -> Iterator[None]:
    words = (running.socket, running.port, tokens.read(home / "token"), job, arguments.streams, arguments.idle)
    child = subprocess.Popen(
        [sys.executable, LOAD, *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    if child.stdout.readline() != "ready\n":
        raise SystemExit("the load could not be made")
    try:
        yield
    finally:
        child.communicate("")


def ask(home: Path, samples: Samples, calls: int) -> None:
    with server.connect(home, start=False) as client:
        for _ in range(calls):
            with samples.timing("jobs"):
                client.jobs.list()
            with samples.timing("nodes"):
                client.nodes.list()
            with samples.timing("new"), server.connect(home, start=False) as other:
                other.jobs.list()


def state_of(running: ServerRecord) -> dict[str, Any]:
    process = psutil.Process(running.pid)
    return {
        "threads": process.num_threads(),
        "tcp_connections": len(process.net_connections("tcp")),
        "rss_bytes": process.memory_info().rss,
        "cpu_share": process.cpu_percent(2.0) / 100,
    }


def report(
    found: dict[str, Samples], before: list[float], arguments: argparse.Namespace, held: dict[str, Any]
) -> dict[str, Any]:
    rows = []
    for case, what in CASES.items():
        row: dict[str, Any] = {"case": case, "what": what}
        for name, samples in found.items():
            row[name] = samples.row(case) | {"p99_s": quantile(samples.row(case)["samples_s"], 0.99)}
        rows.append(row | {"p99_ratio": row["beside"]["p99_s"] / row["alone"]["p99_s"]})
    return machine.circumstances(arguments, before) | {"server_under_load": held, "rows": rows}


def quantile(samples_s: list[float], share: float) -> float:
    return sorted(samples_s)[min(int(len(samples_s) * share), len(samples_s) - 1)]


def show(told: dict[str, Any]) -> None:
    table = Table(box=MARKDOWN)
    for name in ("what", "alone: median", "p99", "beside the load: median", "p99", "times p99", "n"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for row in told["rows"]:
        times = [duration(row[name][key]) for name in ("alone", "beside") for key in ("median_s", "p99_s")]
        table.add_row(row["what"], *times, f"{row['p99_ratio']:.2f}", str(row["beside"]["n"]))
    console.print(table)
    console.print(f"server under load: {told['server_under_load']}; load average {told['load_average']}")


if __name__ == "__main__":
    main()
