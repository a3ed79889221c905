"""What Polyfleet costs on top of Ray and of the machine: one run, everything on this machine, measured in turn.

    python benchmarks/overhead.py [-o FILE] [--quick] [--without-ray-jobs] [--ray-default-python PYTHON]

Peers: an actor started by hand in the same fleet, and `ray job submit` on a plain Ray head with its dashboard, which
needs ray[default]: an interpreter that has it, or an environment made for it once. See benchmarks/README.md.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
from parts import limits, machine, memory, ray_head, tables
from parts.helper import Helper
from parts.jobs import NO_OP, Jobs
from parts.limits import command
from parts.samples import Samples, in_turn, over_limit, ratio
from rich.console import Console

from cluster import paths
from cluster.environments import environments
from cluster.environments.environment_spec import EnvironmentSpec
from cluster.fleet import fleet_record
from cluster.host.processes import stop
from cluster.nodes.raylets import cpu_count
from orchestrator import Orchestrator
from orchestrator.client import client as server
from orchestrator.home import server_record
from orchestrator.store.events.event_store import EventStore
from workers.devices.discovery import discover

CLI = str(Path(sys.executable).with_name("polyfleet"))
RAY_DEFAULT = EnvironmentSpec(requirements=("ray[default]==2.60.0",))
console = Console(stderr=True, highlight=False)


def main() -> int:
    arguments = parse()
    say = partial(console.print, style="dim")
    with own_home() as home:
        measured = Measurement(arguments, say)
        before = machine.load()
        for last in [False] * (measured.fleets - 1) + [True]:
            measured.one_fleet(last)
        found = measured.report(home, before)
    tables.show(found, Console(width=None if sys.stdout.isatty() else 200, highlight=False))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write all numbers here, as JSON")
    parser.add_argument("--quick", action="store_true", help="one fleet and three rounds: does it work at all")
    parser.add_argument("--without-ray-jobs", action="store_true", help="leave `ray job submit` out")
    parser.add_argument("--ray-default-python", type=Path, metavar="PYTHON", help="an interpreter with ray[default]")
    parser.add_argument("--fleets", type=int, default=6, help="how often to bring a fleet up: that many cold samples")
    parser.add_argument("--rounds", type=int, default=20, help="warm rounds on the last fleet")
    return parser.parse_args()


@contextmanager
def own_home() -> Iterator[Path]:
    """A fleet you have up is left alone; nothing of ours stays."""
    home = Path(tempfile.mkdtemp(prefix="pf-overhead-"))
    os.environ["POLYFLEET_HOME"] = str(home)
    try:
        yield home
    finally:
        with ExitStack() as cleanup:
            cleanup.callback(shutil.rmtree, home, ignore_errors=True)
            command(Samples(), "down", [CLI, "down"])


class Measurement:
    """All samples of one run. `one_fleet` is called once per fleet; the last one is also measured warm."""

    def __init__(self, arguments: argparse.Namespace, say: Any):
        self.samples, self.say = Samples(), say
        self.fleets = 1 if arguments.quick else arguments.fleets
        self.rounds = 3 if arguments.quick else arguments.rounds
        self.quick_rounds = 5 if arguments.quick else 5 * arguments.rounds
        self.interpreter = None if arguments.without_ray_jobs else interpreter(arguments.ray_default_python, say)
        self.memory: list[dict[str, Any]] = []
        self.events: list[int] = []
        self.folders = [str(paths.home())]

    def one_fleet(self, last: bool) -> None:
        """Up, the first job of each kind, on the last fleet everything warm, down."""
        self.say("fleet up")
        command(self.samples, "fleet.up", [CLI, "up"])
        self.folders.append(fleet_record.read().temp_dir)
        head = self._head_up()
        with ray_head.ended(head):
            self._jobs(head, last)
            if last:
                self._memory(head)
            self._head_down(head)
        self.say("fleet down")
        command(self.samples, "fleet.down", [CLI, "down"])

    def _jobs(self, head: ray_head.RayHead | None, last: bool) -> None:
        with ExitStack() as opened:
            peers = Peers(opened, head, self.samples)
            jobs = opened.enter_context(Jobs(self.samples))
            in_turn([partial(jobs.one, "job.cold"), *peers.cold()], 1, self.say, "cold")
            if last:
                self._warm(jobs, peers)
                self.events = jobs.events

    def _head_up(self) -> ray_head.RayHead | None:
        """A head alone, then one more node as our fleet has it; that one goes again."""
        if self.interpreter is None:
            return None
        self.say("Ray head with dashboard up")
        start = perf_counter()
        head = ray_head.start(self.interpreter, cpu_count())
        self.samples.add("ray_head.up", perf_counter() - start)
        try:
            joined = ray_head.join(head)
            self.samples.add("ray_pair.up", perf_counter() - start)
            stop([joined])
        except BaseException:
            ray_head.end(head)
            raise
        return head

    def _head_down(self, head: ray_head.RayHead | None) -> None:
        if head is not None:
            with self.samples.timing("ray_head.down"):
                ray_head.end(head)

    def _warm(self, jobs: Jobs, peers: "Peers") -> None:
        file = paths.home() / "noop.json"
        file.write_text(json.dumps(NO_OP))
        whole = partial(command, self.samples)
        ours = [
            partial(jobs.one, "job.warm"),
            jobs.wait,
            partial(whole, "cli.submit", [CLI, "submit", str(file), "--wait"]),
            partial(whole, "cli.jobs", [CLI, "jobs"]),
            partial(whole, "cli.help", [CLI, "--help"]),
        ]
        in_turn([*ours, *peers.warm()], self.rounds, self.say, "warm")
        in_turn([jobs.back_to_back], self.rounds, self.say, "one after the other")
        jobs.queued(self.rounds)
        self._short(peers)

    def _short(self, peers: "Peers") -> None:
        """What takes milliseconds, and what the machine takes."""
        store = EventStore(f"sqlite:///{paths.home() / 'limit.db'}")
        with server.connect() as client, Orchestrator.connect() as o:
            cases = [
                *limits.cases(self.samples, paths.home(), Path(server_record.read(paths.home()).socket), store),
                partial(self._timed, "inventory.rest", client.nodes.list),
                partial(self._timed, "inventory.python", o.inventory),
                partial(self._timed, "inventory.discovery", discover),
                *peers.short(),
            ]
            in_turn(cases, self.quick_rounds, lambda _: None, "")
        store.close()

    def _timed(self, case: str, call: Any) -> None:
        with self.samples.timing(case):
            call()

    def _memory(self, head: ray_head.RayHead | None) -> None:
        self.say("memory and idle load")
        record, running = fleet_record.read(), server_record.read(paths.home())
        groups = {"Polyfleet server": [running.process]}
        groups |= {f"Polyfleet node {p.node}": [p.process] for p in record.processes}
        groups |= {"Ray head with dashboard": [head.process]} if head else {}
        self.memory = memory.measure(groups)

    def report(self, home: Path, before: list[float]) -> dict[str, Any]:
        rows = {case: self.samples.row(case) | {"what": what} for case, what in tables.CASES if case in self.samples}
        peers, walls = ([p for p in pairs if p[0] in rows and p[1] in rows] for pairs in (tables.PEERS, tables.LIMITS))
        return {
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine.describe(home),
            "load_average": {"before": before, "after": machine.load()},
            "settings": {"fleets": self.fleets, "rounds": self.rounds, "no_op": NO_OP["command"]},
            "rows": list(rows.values()),
            "ratios": [ratio(rows[ours], rows[theirs]) for ours, theirs in peers],
            "over_limits": [over_limit(rows[ours], rows[limit]) for ours, limit in walls],
            "durable_events_per_job": self.events,
            "memory": self.memory,
            "memory_totals": memory.totals(self.memory),
            "processes_left": processes_left(self.folders),
        }


class Peers:
    """Ray by hand in our fleet; and `ray job submit` on `head`, unless there is none."""

    def __init__(self, opened: ExitStack, head: ray_head.RayHead | None, samples: Samples):
        self.samples, self.head = samples, head
        with server.connect() as client:
            [node] = client.nodes.list()
        here, argv = Path(sys.executable), NO_OP["command"]
        self.actor = opened.enter_context(
            Helper(here, "bare_actor.py", node["ray_node_id"], *argv, env=dict(os.environ))
        )
        samples.add("actor.join", self.actor.ask("join"))
        if head is not None:
            jobs = Helper(head.interpreter, "ray_jobs.py", head.url, *argv, env=head.env)
            self.jobs = opened.enter_context(jobs)

    def cold(self) -> list[Any]:
        return [partial(self._actor, "actor.cold", "start_and_call"), *self._sdk("ray_job.cold")]

    def warm(self) -> list[Any]:
        return [partial(self._actor, "actor.warm", "start_and_call"), *self._sdk("ray_job.warm"), *self._commands()]

    def short(self) -> list[Any]:
        return [partial(self._actor, "limit.call", "call"), partial(self._actor, "inventory.agent", "register")]

    def _actor(self, case: str, what: str) -> None:
        self.samples.add(case, self.actor.ask(what))

    def _sdk(self, case: str) -> list[Any]:
        return [partial(self._ray_job, case)] if self.head else []

    def _ray_job(self, case: str) -> None:
        for name, seconds in self.jobs.ask("submit_and_wait").items():
            self.samples.add(f"{case}.{name}", seconds)

    def _commands(self) -> list[Any]:
        if self.head is None:
            return []
        where = ("--address", self.head.url)
        words = {
            "ray_cli.submit": ("job", "submit", *where, "--", *NO_OP["command"]),
            "ray_cli.list": ("job", "list", *where),
            "ray_cli.help": ("--help",),
        }
        return [
            partial(command, self.samples, case, self.head.command(*argv), self.head.env)
            for case, argv in words.items()
        ]


def interpreter(given: Path | None, say: Any) -> Path:
    return given.absolute() if given else environments.create(RAY_DEFAULT, say)


def processes_left(folders: list[str]) -> int:
    """That name a folder of ours after `down`: none."""
    lines = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    return sum(any(folder in line for folder in folders) for line in lines)


if __name__ == "__main__":
    sys.exit(main())
