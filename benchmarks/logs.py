"""What a long log costs: its tail, all of it page by page, and writing it, with secrets to mask.

    python benchmarks/logs.py [-o FILE] [--log-mb 1000] [--read-mb 100] [--rounds 10]

The logs are made in a node's folder as a supervisor would have left them. A server in a process of its own reads them
through the agent, without Ray in between: a call through Ray adds milliseconds to each page of 1 MiB. The limit is
`tail -n` and `cat` of the same files.
"""

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from parts import machine
from parts.samples import Samples, in_turn
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from orchestrator.client.client import Client, connect
from orchestrator.units import duration

LINE = "2026-11-22T{:02d}:{:02d}:{:02d}.{:06d}Z out step {} loss 0.693147 grad_norm 1.25 tokens/s 12345 of this rank\n"
OUTPUT = b"".join(b"step %d loss 0.693147 grad_norm 1.25 tokens/s 12345 of this rank\n" % n for n in range(16_000))
CLI = "import sys; from orchestrator.cli.main import main; sys.exit(main())"
TAILS = {
    "tail.agent": "the last 5 lines, by the node's agent",
    "tail.http": "the last 5 lines, `GET /v1/jobs/{ref}/logs?tail=5`",
    "tail1000.http": "the last 1000 lines, the same way",
    "tail.cli": "the last 5 lines, `polyfleet logs --tail 5` as a process",
    "tail.limit": "the last 5 lines, `tail -n 5` as a process",
}
READS = {
    "read.agent": "all, page by page, by the node's agent",
    "read.http": "all, page by page, `GET /v1/jobs/{ref}/logs`",
    "follow.http": "all, as a stream, `GET /v1/jobs/{ref}/logs/stream`",
    "read.cli": "all, `polyfleet logs` into a file",
    "read.limit": "all, `cat` into a file",
}
WRITES = {0: "no secret", 1: "1 secret", 10: "10 secrets", 100: "100 secrets"}
console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)


class OneNode:
    """The parts of the service that read logs, for a fleet of one node whose agent is in this process."""

    def __init__(self, home: Path):
        from orchestrator.core.jobs.fold import Attempt, Record
        from orchestrator.core.model import Candidate, Job
        from orchestrator.core.states import State
        from orchestrator.runtime.jobs.log_copies import LogCopies
        from orchestrator.runtime.jobs.logs import JobLogs

        placed = (("n0/cpu", (0,)),)
        attempt = Attempt(1, 0, "cpu", "cpu", placed, 0.0, ended_s=1.0)
        names = ("long", "short")
        self._records = {
            n: Record(Job(n, n, "run", (Candidate(("cpu",)),), state=State.SUCCEEDED), {}, attempts=(attempt,))
            for n in names
        }
        self._agent, self.ready, self.lost = agent_of(home), True, ""
        agents: Any = self
        self.job_logs = JobLogs(agents, LogCopies(home / "kept-logs", agents))
        self.jobs_table = self.job_views = self

    def get(self, node: str) -> "OneNode":
        return self

    def call(self, node: str, method: str, *arguments: Any) -> Any:
        return getattr(self._agent, method)(*arguments)

    def find(self, ref: str) -> Any:
        return self._records[ref]

    find_run_job = find

    def view(self, record: Any) -> dict[str, Any]:
        from orchestrator.services.views import job_view

        return job_view(record, {})

    def close(self) -> None:
        """Nothing is held."""


def agent_of(home: Path) -> Any:
    from workers.node.agent import Agent

    return Agent(node_dir=home / "node", storage=home / "storage", node="n0", pool="cpu", backend="cpu")


def main() -> None:
    arguments = parse()
    if arguments.serve:
        from orchestrator.server.serve import serve

        service: Any = OneNode
        serve(arguments.serve, 0, service)
        return
    before = machine.load()
    with tempfile.TemporaryDirectory(prefix="polyfleet-logs-", dir=arguments.folder) as folder:
        home = Path(folder)
        sizes = {"long": arguments.log_mb * 10**6, "short": arguments.read_mb * 10**6}
        paths = {job: make_log(home, job, size) for job, size in sizes.items()}
        samples = measure(home, paths, arguments.rounds)
        found = report(samples, {job: path.stat().st_size for job, path in paths.items()}, before, home)
    show(found)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="where the raw samples go, as JSON")
    parser.add_argument("--log-mb", type=int, default=1000, help="of the log whose tail is read")
    parser.add_argument("--read-mb", type=int, default=100, help="of the log that is read whole")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="where the logs are made")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_log(home: Path, job: str, size: int) -> Path:
    record = home / "node" / "attempts" / f"{job}.1.0"
    record.mkdir(parents=True, mode=0o700)
    told = {"job": job, "epoch": 1, "node_rank": 0, "state": "succeeded", "exit_codes": {"0": 0}}
    (record / "order.json").write_text(json.dumps({"lease_s": 20}))
    (record / "outcome.json").write_text(json.dumps(told | {"failure": None, "result": {}, "ended_s": 0.0}))
    with (record / "rank-0.log").open("w") as f:
        number = 0
        while f.tell() < size:
            each = range(number, number + 10_000)
            f.write("".join(LINE.format(n // 3600000 % 24, n // 60000 % 60, n // 1000 % 60, n % 1000, n) for n in each))
            number += 10_000
    return record / "rank-0.log"


def measure(home: Path, paths: dict[str, Path], rounds: int) -> Samples:
    samples = Samples()
    say = partial(Console(stderr=True, highlight=False).print, style="dim")
    with (home / "server.txt").open("wb") as said:
        server = subprocess.Popen([sys.executable, __file__, "--serve", str(home)], stderr=said)
        try:
            with answering(home, server) as client:
                agent = agent_of(home)
                tails = [
                    lambda: tail_by_agent(agent),
                    lambda: client.jobs.logs("long", tail=5),
                    lambda: client.jobs.logs("long", tail=1000),
                    lambda: cli(home, "long", "--tail", "5"),
                    lambda: process(["tail", "-n", "5", str(paths["long"])]),
                ]
                in_turn(timed(samples, TAILS, tails), rounds, say, "tails")
                reads = [
                    lambda: read_by_agent(agent),
                    lambda: read_pages(client),
                    lambda: sum(len(page["lines"]) for page in client.jobs.follow("short")),
                    lambda: cli(home, "short"),
                    lambda: process(["cat", str(paths["short"])]),
                ]
                in_turn(timed(samples, READS, reads), max(rounds // 3, 1), say, "reads")
        finally:
            server.terminate()
            server.wait()
    writes = [partial(write, home, number) for number in WRITES]
    in_turn(timed(samples, {f"write.{n}": "" for n in WRITES}, writes), max(rounds // 3, 1), say, "writes")
    return samples


def answering(home: Path, server: subprocess.Popen[bytes]) -> Client:
    deadline = perf_counter() + 60
    while not (home / "server.json").exists():
        if server.poll() is not None or perf_counter() > deadline:
            raise SystemExit((home / "server.txt").read_text())
        time.sleep(0.05)
    return connect(home, start=False)


def timed(samples: Samples, cases: dict[str, str], calls: list[Callable[[], Any]]) -> list[Callable[[], None]]:
    def once(case: str, call: Callable[[], Any]) -> None:
        with samples.timing(case):
            call()

    return [partial(once, case, call) for case, call in zip(cases, calls, strict=True)]


def tail_by_agent(agent: Any) -> None:
    found = agent.log_tail_range("long", 1, 0, 5)
    assert agent.logs("long", 1, 0, found["start"], 1 << 20)["data"].count("\n") == 5


def read_by_agent(agent: Any) -> None:
    found = {"next": 0, "more": True}
    while found["more"]:
        found = agent.logs("short", 1, 0, found["next"], 1 << 20)


def read_pages(client: Client) -> None:
    page = client.jobs.logs("short")
    while page["lines"]:
        page = client.jobs.logs("short", cursor=page["cursor"])


def cli(home: Path, *words: str) -> None:
    process([sys.executable, "-P", "-c", CLI, "logs", *words], {"POLYFLEET_HOME": str(home)})


def process(command: list[str], environ: dict[str, str] | None = None) -> None:
    with tempfile.TemporaryFile() as out:
        subprocess.run(command, env=os.environ | (environ or {}), stdout=out, check=True)


def write(home: Path, number: int) -> None:
    """All of OUTPUT, ten times, in the pieces a supervisor reads from a pipe."""
    from workers.attempt.supervision.rank_log import RankLog
    from workers.protocol.redaction import Redactor

    log = RankLog(home / "written.log", Redactor([secrets.token_urlsafe(40) for _ in range(number)]))
    for _ in range(10):
        for start in range(0, len(OUTPUT), 64 << 10):
            log.feed("out", OUTPUT[start : start + (64 << 10)])
    log.close()


def report(samples: Samples, sizes: dict[str, int], before: list[float], home: Path) -> dict[str, Any]:
    reads = {**READS, **{f"write.{n}": f"written, {what} to mask" for n, what in WRITES.items()}}
    sized = {case: sizes["short"] if case in READS else 10 * len(OUTPUT) for case in reads}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(home),
        "load_average": {"before": before, "after": machine.load()},
        "log_bytes": sizes["long"],
        "read_bytes": sizes["short"],
        "rows": [{"what": what, **samples.row(case)} for case, what in TAILS.items()],
        "rates": [{"what": what, "bytes": sized[case], **samples.row(case)} for case, what in reads.items()],
    }


def show(found: dict[str, Any]) -> None:
    for rows, title in (("rows", f"{found['log_bytes'] / 1e9:.2f} GB"), ("rates", "MB/s")):
        table = Table(box=MARKDOWN, title=title)
        for column in ("what", "median", "interval", "MB/s", "n"):
            table.add_column(column, justify="left" if column == "what" else "right")
        for row in found[rows]:
            rate = f"{row['bytes'] / row['median_s'] / 1e6:.0f}" if "bytes" in row else ""
            interval = f"{duration(row['low_s'])} – {duration(row['high_s'])}"
            table.add_row(row["what"], duration(row["median_s"]), interval, rate, str(row["n"]))
        console.print(table)
    console.print(f"load {found['load_average']}")


if __name__ == "__main__":
    main()
