"""One real fleet, and cases on it: work that runs, a fault, its end, and then what must hold after every fault.

P1  every acknowledged job is in the store and has ended as it would have without the fault
P2  attempts of a job follow each other: their epochs grow, no older one works once a newer one does, none is left
P3  an attempt goes on from the newest checkpoint that was complete
P4  how long it took is measured and written down, not asserted, but for the limit of a hang
P6  no device stays held, `doctor` finds nothing
P7  every node runs a new job
"""

import json
import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import fleet_processes
import psutil
import pytest
from patience import wait_for

from cluster.errors import PolyfleetError
from orchestrator import Orchestrator, RunJob, TrainJob
from orchestrator.client import client
from orchestrator.home import daemon

FLEET = """
name: chaos
pools:
  left: {{backend: cpu, nodes: 2}}
  right: {{backend: cpu{storage}}}
"""
ROOT = Path(__file__).parents[2]
HISTORY = ROOT / "benchmarks" / "parts" / "history.py"
EVENTS = 10
NODES = ("left-0", "left-1", "right-0")
HANG_S = 300.0
"""So long nothing takes, on a slow machine either; what takes longer never ends."""
SUBJECTS = {"allocation", "store", "head", "ray", "controller", "fleet", "node", "agent"}
STALE_S = 2.0
"""What was frozen works no longer than this after it goes on."""
TRAINS = Path(__file__).with_name("trains.py")
Data = dict[str, Any]


def some_or_all(some: list[Any], everything: list[Any]) -> list[Any]:
    """Values of a test's parameter: a few with every test run, all of them in the campaign."""
    in_campaign = pytest.mark.skipif("POLYFLEET_CHAOS_SEEDS" in os.environ, reason="the campaign has them all")
    return [
        pytest.param(some, marks=in_campaign, id="some"),
        pytest.param(everything, marks=pytest.mark.chaos, id="all"),
    ]


def until(truth: Callable[[], Any]) -> Any:
    """Wait for a truth and return it; no answer is none yet."""
    return wait_for(truth, limit_s=HANG_S, pass_over=(PolyfleetError, psutil.NoSuchProcess), longest_pause_s=0.05)


class Fleet:
    """One that lasts over many cases. `o` is renewed where its server was ended. `storage` is that of `right` where it
    has one of its own; `history` is how many ended jobs its store had at first, each of EVENTS events.
    """

    def __init__(self, home: Path, storage: Path | None = None, history: int = 0):
        self.home, self.storage, self.history = home, storage, history
        self.file = home / "fleet.yaml"
        self.file.write_text(FLEET.format(storage=f", storage: {storage}" if storage else ""))
        if history:
            _fill(home, history)
        self.o = Orchestrator.up(self.file)
        self.sound = True

    def begin(self) -> None:
        """A case. One that the case before left as it should be is used as it is."""
        if not self.sound:
            self.whole()
        self.sound = False

    def whole(self) -> None:
        """As after `polyfleet up`, with a server that has seen no fault yet."""
        self.o.close()
        daemon.stop_server(self.home)
        self.o = Orchestrator.up(self.file)
        until(lambda: {n["state"] for n in self.o.inventory()} == {"ready"})

    def reconnected(self) -> Orchestrator:
        """Starts a server where there is none."""
        self.o.close()
        self.o = Orchestrator.connect()
        return self.o

    def restarted(self) -> Orchestrator:
        """With a server in the environment as it is by now, which knows all nodes."""
        self.o.close()
        daemon.stop_server(self.home)
        self.reconnected()
        until(lambda: {n["state"] for n in self.o.inventory()} == {"ready"})
        return self.o

    def held_nodes_started(self) -> None:
        """A node that was lost in case after case is not started any more by itself: `doctor` says how it is."""
        if any("run `polyfleet up` to start it now" in told["message"] for told in self.o.fleet.doctor()):
            Orchestrator.up(self.file).close()

    def resume_nodes(self) -> None:
        with client.connect() as asked:
            for node in asked.nodes.list():
                asked.nodes.resume(node["node"])

    def server(self) -> psutil.Process:
        return fleet_processes.server(self.home)

    def agent(self, node: str) -> psutil.Process:
        found: psutil.Process = until(lambda: _or_none(lambda: fleet_processes.agent(self.home, node)))
        return found

    def down(self) -> None:
        self.reconnected().down()

    def log(self) -> str:
        return (self.home / "logs" / "server.log").read_text()


def _fill(home: Path, history: int) -> None:
    """As if those jobs had been submitted, and had ended."""
    words = [sys.executable, str(HISTORY), f"sqlite:///{home / 'polyfleet.db'}", str(history), "0", str(EVENTS)]
    paths = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    subprocess.run(words, env=os.environ | {"PYTHONPATH": paths}, check=True)


def _or_none(find: Callable[[], Any]) -> Any:
    try:
        return find()
    except AssertionError:
        return None


@dataclass(eq=False)
class Training:
    id: str
    ledger: Path

    def lines(self, *what: str) -> list[Data]:
        if not self.ledger.exists():
            return []
        whole = self.ledger.read_text().rpartition("\n")[0].splitlines()
        return [told for told in map(json.loads, whole) if told["what"] in what]

    @property
    def epoch(self) -> int:
        return max((told["epoch"] for told in self.lines("start")), default=0)

    def steps_since(self, at_s: float, epoch: int = 0) -> list[Data]:
        return [s for s in self.lines("step") if s["at_s"] > at_s and s["epoch"] >= epoch]


@dataclass(eq=False)
class Case:
    """Faults, one after the other, each with a record; the newest is at `at_s`, and `before` are the epochs of the
    trainings by then. Once it is `ended`, `at_s` is its end. `expected` are states, by job. What was frozen goes on at
    `thawed_s`: an older attempt may work for STALE_S from then.
    """

    fleet: Fleet
    folder: Path
    seed: int
    random: random.Random
    records: list[Data] = field(default_factory=list)
    expected: dict[str, str] = field(default_factory=dict)
    trainings: list[Training] = field(default_factory=list)
    at_s: float = 0.0
    at: datetime = datetime.min
    ended: bool = False
    before: dict[str, int] = field(default_factory=dict)
    thawed_s: float | None = None

    @property
    def record(self) -> Data:
        return self.records[-1]

    def fault(self, fault: str, what: str, **more: Any) -> None:
        """The next one; what is measured from now on is of it."""
        told = {"fault": fault, "what": what, "seed": self.seed, "load": round(os.getloadavg()[0], 1)}
        self.records.append(told | {"case": case_name()} | more)

    @property
    def end(self) -> Path:
        return self.folder / "end"

    def train(self, arguments: Data | None = None, ends: str = "SUCCEEDED", **fields: Any) -> Training:
        ledger = self.folder / f"ledger-{len(self.trainings)}"
        given = {"end": str(self.end), "ledger": str(ledger)} | (arguments or {})
        working_dir = self.folder / "code"
        working_dir.mkdir(exist_ok=True)
        (working_dir / "trains.py").write_text(TRAINS.read_text())
        job = self.fleet.o.submit(TrainJob(entry="trains.py", working_dir=str(working_dir), arguments=given, **fields))
        training = Training(job.id, ledger)
        self.trainings.append(training)
        self.expected[job.id] = ends
        return training

    def run(self, command: str, ends: str = "SUCCEEDED", key: str = "", **fields: Any) -> str:
        job = self.fleet.o.submit(RunJob(command=command, **fields), key=key)
        self.expected[job.id] = ends
        return job.id

    def gang(self) -> Training:
        """On both nodes of `left`, beside a training on the third, and commands that wait for a node."""
        gang = self.train(resources={"pool": "left", "nodes": 2})
        self.train(resources={"pool": "right"})
        self.works()
        for pool in ("left", "right"):
            self.run("true", resources={"pool": pool})
        return gang

    def single(self, **fields: Any) -> Training:
        """On `right`, with `left` to go to, where a command runs already. Only a fault moves it: the command that waits
        for `right` would, after a minute, since the training could run on `left`.
        """
        resources = {"ordered": [{"pool": "right"}, {"pool": "left"}]}
        alone = self.train(resources=resources, preemptible=False, **fields)
        self.works()
        self.run(f"while [ ! -e {self.end} ]; do sleep 0.2; done", resources={"node": "left-0"})
        self.run("true", resources={"pool": "right"})
        return alone

    def works(self) -> None:
        """Every training has saved; then a seeded while."""
        until(lambda: all(t.lines("saved") for t in self.trainings))
        time.sleep(self.random.uniform(0.0, 1.5))

    def view(self, job: str) -> Data:
        return dict(self.fleet.o.job(job).view)

    def inject(self, act: Callable[[], Any]) -> None:
        self.before = {training.id: training.epoch for training in self.trainings}
        self.at_s, self.at, self.ended = time.monotonic(), datetime.now(UTC), False
        act()

    def goes_on(self, training: Training, newer: bool = True) -> None:
        """Steps again, in an attempt newer than that of the fault, unless the same one will do. What is measured from
        the fault's end has names of its own.
        """
        epoch = self.before[training.id]
        steps = until(lambda: training.steps_since(self.at_s, epoch + 1 if newer else epoch))
        self.took("healed_recovery_s" if self.ended else "recovery_s", steps[0]["at_s"] - self.at_s)
        if newer:
            placed = datetime.fromisoformat(self.view(training.id)["attempts"][-1]["placed_at"])
            self.took("healed_placed_s" if self.ended else "placed_s", (placed - self.at).total_seconds())

    def over(self, ago_s: float = 0.0) -> None:
        """The fault has ended, so long ago: what is measured from now on counts from there."""
        self.at_s, self.at = time.monotonic() - ago_s, datetime.now(UTC) - timedelta(seconds=ago_s)
        self.ended = True

    def told(self, training: Training, name: str = "", since_s: float | None = None) -> None:
        """The server tells of a step that was done after the fault, or its end, or since then."""
        since_s = self.at_s if since_s is None else since_s

        def told() -> bool:
            newer = training.steps_since(since_s)
            return bool(newer) and self.view(training.id)["metrics"].get("step", 0) >= newer[0]["step"]

        until(told)
        self.took(name or ("again_s" if self.ended else "recovery_s"), time.monotonic() - self.at_s)

    def took(self, name: str, seconds: float) -> None:
        self.record[name] = round(seconds, 2)

    # -- what holds after every fault

    def ends(self) -> None:
        self.end.touch()
        for job, state in self.expected.items():
            view = until(lambda job=job: self._ended(job))
            assert view["state"] == state, (view["reason"], view["failure"], view["attempts"])
        kept = {job["id"] for job in self.fleet.o.jobs.list(limit=1000)}
        assert self.expected.keys() <= kept
        for training in self.trainings:
            self._attempts_follow_each_other(training)
        until(lambda: not fleet_processes.of_jobs(self.expected))

    def _ended(self, job: str) -> Data | None:
        view = self.view(job)
        return view if view["state"] in ("SUCCEEDED", "FAILED", "CANCELLED") else None

    def _attempts_follow_each_other(self, training: Training) -> None:
        epochs = [attempt["attempt"] for attempt in self.view(training.id)["attempts"]]
        assert epochs == sorted(set(epochs))
        begun: dict[int, float] = {}
        saving, saved = {0}, 0
        for told in training.lines("start", "step", "saving", "saved"):
            if any(epoch > told["epoch"] for epoch in begun):
                assert self._stale(told), f"{training.id}: {told} after a newer attempt began: {begun}"
            elif told["rank"] == 0 and told["what"] == "start":
                begun[told["epoch"]] = told["at_s"]
                assert told["step"] >= saved and told["step"] in saving, (told, saved, saving)
            elif told["rank"] == 0 and told["what"] == "saving":
                saving.add(told["step"])  # it may be complete before it is noted as such
            elif told["rank"] == 0 and told["what"] == "saved":
                saved = max(saved, told["step"])

    def _stale(self, told: Data) -> bool:
        return self.thawed_s is not None and told["at_s"] < self.thawed_s + STALE_S

    def whole(self) -> None:
        o = self.fleet.o
        until(lambda: {n["state"].partition(" ")[0] for n in o.inventory()} <= {"ready", "quarantined"})
        self.fleet.resume_nodes()
        until(lambda: {n["state"] for n in o.inventory()} == {"ready"})
        until(lambda: not [d for n in o.inventory() for d in n["devices"] if d["allocated_to"]])
        until(lambda: not [f for f in o.fleet.doctor() if f["level"] != "info" and f["subject"] in SUBJECTS])
        for probe in [self.run("true", resources={"node": node}) for node in NODES]:
            view = until(lambda probe=probe: self._ended(probe))
            assert view["state"] == "SUCCEEDED", (view["reason"], view["failure"], view["attempts"])


@contextmanager
def case(fleet: Fleet, folder: Path, fault: str, what: str, seed: int, **more: Any) -> Iterator[Case]:
    """Faults are injected within; afterwards everything is to be as it was. Figures are printed, and kept."""
    fleet.begin()
    began_s = len(fleet.log())
    now = Case(fleet, folder, seed, random.Random(f"{fault} {what} {seed}"))
    now.fault(fault, what, **more)
    ended = False
    try:
        yield now
        ended = True
        fleet.reconnected()
        fleet.held_nodes_started()
        now.ends()
        now.whole()
        fleet.sound = True
    except (KeyboardInterrupt, pytest.skip.Exception):
        now.records.clear()  # broken off, which says nothing of the fault
        _clear(now)
        raise
    except BaseException as e:
        for record in now.records if ended else now.records[-1:]:  # what does not hold later may be of any of them
            record |= {"outcome": "failed", "error": repr(e)[:2000]}
        _tell(now, began_s)
        _clear(now)
        raise
    finally:
        for record in now.records:
            keep({"outcome": "held"} | record)


def case_name() -> str:
    """As pytest names the test that runs now."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]


def keep(record: Data) -> None:
    """A line of the file that the campaign makes its results of. Messages name the home by its variable."""
    line = json.dumps(record).replace(os.environ["POLYFLEET_HOME"], "$POLYFLEET_HOME")
    print(line)
    if kept := os.environ.get("POLYFLEET_CHAOS_RESULTS"):
        with Path(kept).open("a") as file:
            file.write(line + "\n")


def _tell(now: Case, began_s: int) -> None:
    """What one needs to understand a failure: the server's log and the history of every job of the case."""
    print(now.fleet.log()[began_s:][-8000:])
    try:
        with client.connect() as asked:
            for job in now.expected:
                print(job, *(json.dumps(event) for event in asked.jobs.history(job)), sep="\n  ")
            print(*asked.fleet.doctor(), sep="\n")
    except PolyfleetError:
        traceback.print_exc()


def _clear(now: Case) -> None:
    """The next case begins with free nodes."""
    now.end.touch()
    try:
        o = now.fleet.reconnected()
        for job in now.expected:
            o.jobs.cancel(job)
    except PolyfleetError:
        traceback.print_exc()
