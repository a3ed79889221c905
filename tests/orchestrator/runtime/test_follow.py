"""What agents tell, handled: a report that cannot be used concerns its own attempt, and nothing bad is stored."""

import json
import queue
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from orchestrator.runtime.live import live_of
from orchestrator.runtime.loop import Runtime

from cluster.errors import FleetError, NotFound, SpecError
from cluster.vocabulary import NodeFacts
from orchestrator.core import fold
from orchestrator.core.model import Candidate, Event, Job, Recovery, Start
from orchestrator.core.states import State
from orchestrator.runtime import poison
from orchestrator.runtime.agents import Agent, Agents
from orchestrator.runtime.jobs import Jobs, NotStored
from orchestrator.store import EventStore

FACTS = NodeFacts(**{
    **{field: {} if "dict" in str(kind) else () if "tuple" in str(kind) else 0 if "int" in str(kind) else ""
       for field, kind in NodeFacts.__annotations__.items()},
    "node": "n", "pool": "cpu", "storage": "/storage",
})  # fmt: skip


class NoNodes(ThreadPoolExecutor):
    """What would be asked of nodes and of Ray, of which there are none."""

    def submit(self, *_):
        return Future()


class Controller:
    """The controller's parts on a real store, without its thread and without a fleet."""

    def __init__(self, path):
        self.store = EventStore(f"sqlite:///{path}")
        self.jobs = Jobs(self.store)
        self.agents = Agents(lambda *_: None)
        self.agents._by_node["n"] = Agent("ray", None, FACTS)
        self.inbox = queue.SimpleQueue()
        for job in ("culprit", "honest"):
            self.place(job, 1)
        self.runtime = Runtime(self.jobs, self.store, self.agents, None, self.inbox)
        self.runtime._placements._threads = NoNodes()
        self.lives = self.runtime._lives

    def place(self, job, epoch, **recovery):
        made = Job(job, job, "run", (Candidate(("cpu",)),), recovery=Recovery(**recovery))
        if epoch == 1:
            self.jobs.record(fold.submitted(made, {}, "", time.time()))
        start = Start(job, 0, (("n/cpu", (0,)),))
        self.jobs.record(fold.placed(self.jobs[job].job, start, "cpu", "cpu", time.time()))
        return live_of(self.jobs[job])

    def hear(self, *reports, **more):
        self.runtime._handle([("watched", "n", {"facts": None, "reports": reports, "attempts": None} | more)])

    def turn(self):
        for live in list(self.lives.values()):
            self.runtime._placements.steer(live)

    def close(self):
        self.runtime._placements.close()
        self.store.close()


@pytest.fixture
def controller(tmp_path):
    it = Controller(tmp_path / "db")
    yield it
    it.close()


def report(job, *events, phase="running", outcome=None, **more):
    named = {"job": job, "epoch": 1, "node_rank": 0, "phase": phase, "cursor": 9}
    return named | {"events": events, "outcome": outcome} | more


def event(step, **more):
    told = {"t": time.time(), "rank": 0, "type": "report", "at": step} | more
    named = {name: told.pop(name) for name in ("t", "rank", "type", "at")}
    return named | {"data": {"step": step} | told}


def outcome(job, state="succeeded", **more):
    told = {"state": state, "exit_codes": {"0": 0}, "failure": None, "result": {}, "ended_s": time.time()}
    return {"job": job, "epoch": 1, "node_rank": 0} | told | more


@pytest.mark.parametrize(
    "poisoned",
    [
        {"job": "culprit", "epoch": 1, "node_rank": 0},
        report("culprit", 7),
        report("culprit", cursor="nonsense", events=None),
        report("culprit", phase="ended", outcome=outcome("culprit", "weird")),
        report("culprit", phase="ended", outcome=outcome("culprit", exit_codes={"0": "zero"})),
        report("culprit", phase="ended", outcome=[1]),
        report("culprit", node_rank=7),
        report("culprit", node_rank="0"),
        {},
        None,
    ],
)
def test_a_report_that_cannot_be_used_stops_no_other(controller, poisoned):
    controller.hear(poisoned, report("honest", event(1), phase="ended", outcome=outcome("honest")))
    controller.turn()
    assert controller.jobs["honest"].job.state is State.SUCCEEDED
    assert controller.jobs.metrics("honest") == {"step": 1}
    assert controller.inbox.empty(), "nothing is put back for ever"


@pytest.mark.parametrize("told", [outcome("culprit", "weird"), outcome("culprit", failure={"kind": "x"}), {}, [1]])
def test_an_outcome_that_is_none_ends_its_attempt_as_unreadable(controller, told):
    controller.hear(report("culprit", phase="ended", outcome=told))
    controller.turn()
    record = controller.jobs["culprit"]
    assert (record.job.state, record.failure["kind"]) == (State.FAILED, "unreadable")
    assert "its outcome" in record.failure["message"]
    assert "culprit" not in controller.lives


def test_a_report_that_cannot_be_used_stops_its_attempt_which_then_ends(controller):
    controller.hear(report("culprit", cursor="nonsense", events=None))
    controller.turn()
    assert controller.lives["culprit"].stopping in ("cancel", ""), "asked for, and again until its node has heard"
    assert controller.lives["culprit"].parts[0].spoiled
    controller.hear(report("culprit", phase="ended", outcome=outcome("culprit")))
    controller.turn()
    assert controller.jobs["culprit"].failure["kind"] == "unreadable"


@pytest.mark.parametrize(
    "bad",
    [
        event(1, t=float("nan")),
        event(1, t=float("inf")),
        event(1, t=10**400),
        event(1, t=253_370_764_801.0),
        event(2**70, type="checkpoint", path="/storage/x"),
        event(1, type="checkpoint", path=7),
        event(1, loss=float("nan")),
        event(1, loss={"a": 1}),
        event(1, loss="\ud800"),
        event(1, rank=False),
        {},
        None,
    ],
)  # fmt: skip
def test_an_event_that_would_harm_the_store_is_left_out_and_the_next_counts(controller, bad):
    """Also if an agent lets it through."""
    saved = event(2, type="checkpoint", path="/storage/culprit/2", bytes=5)
    controller.hear(report("culprit", bad, saved), report("honest", event(3)))
    assert controller.jobs["culprit"].checkpoint == {"pool": "cpu", "path": "culprit/2", "step": 2, "bytes": 5}
    assert controller.jobs.metrics("honest") == {"step": 3}
    assert controller.inbox.empty()
    assert json.dumps([e.data for e in controller.store.read(0)], allow_nan=False)


@pytest.mark.parametrize("path", ["/elsewhere/2", "/storage/../etc", "../storage/x", "storage/x", "/storage2/x"])
def test_a_checkpoint_outside_of_the_storage_does_not_count(controller, path):
    controller.hear(report("culprit", event(2, type="checkpoint", path=path)))
    assert controller.jobs["culprit"].checkpoint is None


def test_only_what_the_store_cannot_take_now_is_put_back(controller):
    controller.store.close()
    with pytest.raises(NotStored):
        controller.hear(report("honest", event(2, type="checkpoint", path="/storage/honest/2")))
    kind, node, answer = controller.inbox.get_nowait()
    assert (kind, node, answer["reports"][0]["job"]) == ("watched", "n", "honest")


def test_an_ending_that_cannot_be_stored_is_one_that_says_so(controller):
    """A result that no codec takes: it cannot come from an agent that checks it."""
    controller.lives["culprit"].parts[0].ended = outcome("culprit", result={"x": object()})
    controller.lives["honest"].parts[0].ended = outcome("honest")
    controller.turn()
    assert (controller.jobs["culprit"].job.state, controller.jobs["culprit"].failure["kind"]) == (
        State.FAILED,
        "unreadable",
    )
    assert controller.jobs["honest"].job.state is State.SUCCEEDED


def test_what_ranks_wrote_in_vain_is_a_finding_that_names_their_job(controller):
    controller.hear(poison={"culprit.1.0": {"count": 3, "reason": "a line of events.jsonl is no JSON object"}})
    [(node, finding)] = poison.findings(controller.agents.items())
    assert (node, finding.level, finding.subject) == ("n", "warning", "culprit")
    assert "3 times" in finding.message
    assert "is no JSON object" in finding.message
    assert "`polyfleet cancel culprit`" in finding.remedy
    controller.hear(poison={})
    assert list(poison.findings(controller.agents.items())) == []


def test_launches_that_no_agent_took_spend_no_interruption_and_wait_longer_each_time(controller):
    controller.place("patient", 1, max_interruptions=0)
    pauses = []
    for times in (1, 2, 3):
        controller.lives["patient"] = live_of(controller.jobs["patient"])
        error = FleetError("node n: start gave no answer within 20 s", "") if times < 3 else NotFound("no package", "")
        controller.runtime._placements.launch_failed(controller.lives["patient"], error)
        controller.turn()
        record = controller.jobs["patient"]
        assert (record.job.state, record.job.interruptions, record.job.refusals) == (State.RECOVERING, 0, times)
        assert record.failure["kind"] == "launch"
        pauses.append(record.job.not_before_s - time.time())
        controller.place("patient", times + 1)
    assert record.reason == "could not be started 3 times in a row: no package"
    assert pauses == pytest.approx([1, 2, 4], abs=0.5)


def test_a_launch_that_its_user_must_mend_ends_the_job(controller):
    controller.runtime._placements.launch_failed(controller.lives["culprit"], SpecError("secrets.X", "is not set"))
    controller.turn()
    assert (controller.jobs["culprit"].job.state, controller.jobs["culprit"].failure["kind"]) == (State.FAILED, "user")


def test_an_event_that_does_not_belong_to_the_store_is_refused_there(controller):
    with pytest.raises(Exception, match="has time nan"):
        controller.jobs.record(Event("honest", "started", 1, float("nan")))
