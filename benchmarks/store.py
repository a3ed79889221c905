"""What the job store costs, with little and with much history, against a bare SQLite that commits the same rows.

    python benchmarks/store.py [-o FILE] [--seconds 10] [--history 100000] [--listed 1000000] [--open 100000]

Durable submits over HTTP by 64 clients in a process of their own, to a server with an empty history and to one with
many ended jobs, in turn; submits of 1,000 a call; pages of the list; the start of a server with many open jobs. The
limit is SQLite alone, with the rows of as many submits in each transaction as there are clients. Each part has a
home of its own.
"""

import argparse
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
from parts import history, machine
from parts.limits import command
from parts.samples import Samples
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from cluster.host import tokens
from orchestrator.client import client as server
from orchestrator.home import daemon
from orchestrator.store.database.sqlite import COMMON, WRITER

CLI = str(Path(sys.executable).with_name("polyfleet"))
PARTS = Path(__file__).parent / "parts"
BULK = 1000
PAGE = 100
console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
Row = dict[str, Any]

OPENED = """
import json, sys
from time import perf_counter
import psutil
from orchestrator.runtime.jobs.jobs import Jobs
from orchestrator.store.rows import record_codec
from orchestrator.store.events.event_store import EventStore

record_codec._adapter()
process = psutil.Process()
before = process.memory_info().rss
begun = perf_counter()
store = EventStore(sys.argv[1])
opened_s = perf_counter() - begun
used = process.memory_info().rss - before
jobs = Jobs(store)
begun = perf_counter()
jobs.check_histories() if len(sys.argv) > 2 else None
told = {"opened_s": opened_s, "rss_bytes": used, "open": len(jobs.open()), "checked_s": perf_counter() - begun}
print(json.dumps(told))
store.close()
"""


def main() -> None:
    arguments = parse()
    before, rows = machine.load(), []
    for part in (submits, bulk, pages, starts):
        Console(stderr=True).print(part.__name__, style="dim")
        rows += part(arguments)
    told = machine.circumstances(arguments, before) | {"rows": rows}
    show(told)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(told, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="where the raw figures go, as JSON")
    parser.add_argument("--seconds", type=float, default=10, help="of each round of submits")
    parser.add_argument("--rounds", type=int, default=3, help="of submits, for each length of history")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--history", type=int, default=100_000, help="ended jobs before the submits")
    parser.add_argument("--listed", type=int, default=1_000_000, help="jobs that pages are read from")
    parser.add_argument("--open", type=int, default=100_000, help="open jobs at the start, and as many ended")
    parser.add_argument("--calls", type=int, default=300, help="pages of each kind")
    return parser.parse_args()


# -- submits over HTTP


@contextmanager
def serving(ended: int) -> Iterator[Path]:
    """A home with a server, a fleet of one CPU node and that history; nothing stays. The jobs of this benchmark are of
    a lower priority than one that sleeps on the only device: none of them starts.
    """
    home = Path(tempfile.mkdtemp(prefix="pf-store-"))
    os.environ["POLYFLEET_HOME"] = str(home)
    try:
        history.fill(url(home), ended, 0, 2)
        daemon.start_server(home)
        command(Samples(), "up", [CLI, "up"])
        with server.connect(home, start=False) as client:
            client.jobs.submit({"name": "sleeps", "command": "sleep 3600", "priority": 5})
        yield home
    finally:
        command(Samples(), "down", [CLI, "down"])
        shutil.rmtree(home, ignore_errors=True)


def url(home: Path) -> str:
    return f"sqlite:///{home / 'polyfleet.db'}"


def load(home: Path, clients: int, seconds: float, jobs: int = 0) -> Row:
    """What the clients of one round measured, and the shares of a core that the server and they took."""
    running = daemon.find_server(home)
    assert running is not None
    words = [running.socket, tokens.read(home / "token"), clients, seconds, *([jobs] if jobs else [])]
    process = psutil.Process(running.pid)
    before = process.cpu_times()
    ran = subprocess.run(
        [sys.executable, PARTS / "submit_load.py", *map(str, words)], capture_output=True, text=True, check=True
    )
    after, told = process.cpu_times(), json.loads(ran.stdout)
    if told["error"]:
        raise SystemExit(f"a submit was refused: {told['error']}")
    used_s = after.user + after.system - before.user - before.system
    cores = {"server_cores": used_s / told["took_s"], "client_cores": told["cpu_s"] / told["took_s"]}
    return told | cores | {"rss_bytes": process.memory_info().rss}


def submits(arguments: argparse.Namespace) -> list[Row]:
    """In turn, a server of its own for each round: the jobs of a round are history for the next."""
    rounds: dict[int, list[Row]] = {0: [], arguments.history: []}
    for number in range(arguments.rounds):
        for ended in sorted(rounds, reverse=bool(number % 2)):
            with serving(ended) as home:
                rounds[ended].append(load(home, arguments.clients, arguments.seconds))
    found = [of_rounds(f"submit, {ended:,} jobs of history", told) for ended, told in rounds.items()]
    limit = "limit: SQLite alone, all clients in one transaction"
    return [*found, bare(limit, arguments.clients, arguments.seconds)]


def of_rounds(what: str, rounds: list[Row], jobs: int = 1) -> Row:
    """Rates of all rounds; latencies of all their calls."""
    samples = sorted(s for told in rounds for s in told["samples_s"])
    rates = [len(told["samples_s"]) * jobs / told["took_s"] for told in rounds]
    return {
        "what": what,
        "per_s": sorted(rates)[len(rates) // 2],
        "rates": rates,
        "median_s": quantile(samples, 0.5),
        "p99_s": quantile(samples, 0.99),
        "n": len(samples),
        "server_cores": [told.get("server_cores") for told in rounds],
        "client_cores": [told.get("client_cores") for told in rounds],
        "rss_bytes": max(told.get("rss_bytes", 0) for told in rounds),
    }


def bulk(arguments: argparse.Namespace) -> list[Row]:
    with serving(0) as home:
        told = load(home, 2, arguments.seconds, BULK)
    what = f"submit, {BULK:,} jobs a call, 2 clients"
    return [of_rounds(what, [told], BULK), bare("limit: SQLite alone", BULK, arguments.seconds)]


def bare(what: str, group: int, seconds: float) -> Row:
    """The rows of one submit in three tables with the store's indexes and settings, `group` jobs in a transaction."""
    home = Path(tempfile.mkdtemp(prefix="pf-store-"))
    try:
        history.fill(url(home), 0, 1, 2)
        with closing(sqlite3.connect(home / "polyfleet.db", isolation_level=None)) as database:
            for pragma in (*COMMON, *WRITER):
                database.execute(pragma).close()
            tables = ("events", "jobs")
            rows = {t: database.execute(f"SELECT * FROM {t} ORDER BY 1 DESC LIMIT 1").fetchone() for t in tables}
            samples, number, begun_s = [], 0, perf_counter()
            while (start_s := perf_counter()) - begun_s < seconds:
                database.execute("BEGIN IMMEDIATE")
                numbers = range(number + 10, number := number + 10 + group)
                insert(database, "events", [(n, *rows["events"][1:]) for n in numbers])
                insert(database, "jobs", [(n, f"sweep-{n:08x}", *rows["jobs"][2:]) for n in numbers])
                insert(database, "requests", [(f"{n:032x}", "d" * 64, 201, '{"id":"x"}', 1.0) for n in numbers])
                database.execute("COMMIT")
                samples.append(perf_counter() - start_s)
        return of_rounds(f"{what} of {group}", [{"samples_s": samples, "took_s": perf_counter() - begun_s}], group)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def insert(database: sqlite3.Connection, table: str, rows: list[tuple[Any, ...]]) -> None:
    database.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)


# -- pages and starts


def pages(arguments: argparse.Namespace) -> list[Row]:
    """Of a store in this process: the newest, one from the middle, and by state and name, all with `PAGE` jobs."""
    from orchestrator.runtime.jobs.jobs import Jobs
    from orchestrator.store.events.event_store import EventStore

    home = Path(tempfile.mkdtemp(prefix="pf-store-"))
    try:
        history.fill(url(home), arguments.listed - arguments.listed // 10, arguments.listed // 10, 2)
        store = EventStore(url(home))
        jobs, middle = Jobs(store), store.last_seq // 2
        kinds: dict[str, tuple[Any, ...]] = {
            "newest": ((), None, PAGE),
            "from the middle": ((), middle, PAGE),
            "of two states": (("CANCELLED", "FAILED"), middle, PAGE),
            "of one name and state": (("CANCELLED",), middle, PAGE, "sweep-17"),
        }
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(arguments.calls):
            for kind, asked in kinds.items():
                begun_s = perf_counter()
                page = jobs.page(*asked)
                found[kind].append(perf_counter() - begun_s)
                assert len(page.records) == PAGE
        store.close()
        size = (home / "polyfleet.db").stat().st_size
        what = f"page of {PAGE}, {arguments.listed:,} jobs: "
        return [of_pages(what + kind, samples, size) for kind, samples in found.items()]
    finally:
        shutil.rmtree(home, ignore_errors=True)


def of_pages(what: str, samples: list[float], size_bytes: int) -> Row:
    ordered = sorted(samples)
    quantiles = {"median_s": quantile(ordered, 0.5), "p99_s": quantile(ordered, 0.99)}
    return {"what": what, **quantiles, "n": len(samples), "database_bytes": size_bytes}


def starts(arguments: argparse.Namespace) -> list[Row]:
    """A process that opens a store whose jobs have five events each."""
    home = Path(tempfile.mkdtemp(prefix="pf-store-"))
    try:
        history.fill(url(home), arguments.open, arguments.open, 5)
        told = []
        for number in range(3):
            words = [sys.executable, "-c", OPENED, url(home), *(["check"] if number == 2 else [])]
            told.append(json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout))
        opened = sorted(t["opened_s"] for t in told)
        what = f"start, {arguments.open:,} jobs open, as many ended, {arguments.open * 10:,} events"
        check = f"reading the histories of {told[-1]['open']:,} open jobs, in the background"
        row = {"what": what, "median_s": opened[1], "p99_s": opened[2], "n": 3, "samples_s": opened}
        return [
            row | {"rss_bytes": max(t["rss_bytes"] for t in told)},
            {"what": check, "median_s": told[-1]["checked_s"], "p99_s": told[-1]["checked_s"], "n": 1},
        ]
    finally:
        shutil.rmtree(home, ignore_errors=True)


def quantile(ordered: list[float], share: float) -> float:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def show(told: Row) -> None:
    table = Table(box=MARKDOWN)
    for name in ("what", "per second", "median", "p99 or worst", "server's memory", "n"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for row in told["rows"]:
        rate = f"{row['per_s']:,.0f}" if "per_s" in row else ""
        memory = f"{row['rss_bytes'] / 2**20:.0f} MiB" if row.get("rss_bytes") else ""
        times = [f"{row[key] * 1000:,.1f} ms" for key in ("median_s", "p99_s")]
        table.add_row(row["what"], rate, *times, memory, str(row["n"]))
    console.print(table)
    console.print(f"load average {told['load_average']}")


if __name__ == "__main__":
    main()
