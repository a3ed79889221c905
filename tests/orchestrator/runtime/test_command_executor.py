"""Commands as they are carried out while Ray's head, which is recorded, does not answer some of them."""

import queue
import threading
import time
from collections import defaultdict
from concurrent.futures import Future

import pytest
from patience import LIMIT_S, wait_for

from cluster.errors import FleetError
from orchestrator.core.controller import commands as c
from orchestrator.core.controller import messages as m
from orchestrator.core.controller.nodes import Node
from orchestrator.runtime.agents import actors, fences, ray_calls, reservations
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.agents.ray_calls import RAY
from orchestrator.runtime.checkpoints.checkpoints import CheckpointService
from orchestrator.runtime.controller import command_executor
from orchestrator.runtime.controller.command_executor import LAUNCHES, CommandExecutor
from orchestrator.runtime.controller.launch import Launcher
from orchestrator.runtime.files.code_archives import ServerCodeArchives
from orchestrator.runtime.files.data_moves import DataMoves
from orchestrator.runtime.files.data_store import DataStore
from orchestrator.runtime.jobs.jobs import Jobs
from orchestrator.runtime.jobs.log_copies import LogCopies
from orchestrator.runtime.jobs.log_preservation import LogPreservation
from orchestrator.store.events.event_store import EventStore


class Ref:
    def future(self):
        done = Future()
        done.set_result(None)
        return done


class RecordedActor:
    """Does at once what it is told."""

    class stop:
        remote = staticmethod(lambda *_: Ref())


class RecordedHead:
    """Fences, and reservations of which no call returns before `answers`. Reads of a job whose name is in `frozen` take
    until its event is set; what they return stood there when they were asked.
    """

    def __init__(self):
        self.answers = threading.Event()
        self.frozen, self.stopped = {}, {}
        self.stands, self.reads = defaultdict(int), []

    def find(self, place):
        assert self.answers.wait(LIMIT_S)
        raise FleetError("the test has ended")

    def read(self, job):
        stands = self.stands[job]
        self.stopped.setdefault(job, threading.current_thread())
        self.reads.append(job)
        if self.reads.count(job) == 1 and job in self.frozen:
            self.frozen[job].wait(LIMIT_S)
        return stands

    def write(self, job, epoch):
        self.stands[job] = epoch

    def freeze(self, job):
        self.frozen[job] = threading.Event()
        return self.frozen[job]


@pytest.fixture
def head(monkeypatch):
    head = RecordedHead()
    monkeypatch.setattr(actors, "start_agent", lambda ray_id, cpus, deliver: RecordedActor())
    monkeypatch.setattr(reservations, "_find", head.find)
    monkeypatch.setattr(fences, "_read", head.read)
    monkeypatch.setattr(fences, "_write", head.write)
    yield head
    head.answers.set()
    for frozen in head.frozen.values():
        frozen.set()
    wait_for(lambda: not RAY._calls)


@pytest.fixture
def told():
    return queue.SimpleQueue()


@pytest.fixture
def carrier(head, told, tmp_path):
    store = EventStore(f"sqlite:///{tmp_path / 'jobs.db'}")
    agents = Agents(told.put)
    agents.nodes = {"a": Node("a", "ray-a", 0.0)}
    agents.start("a", "ray-a")
    assert told.get(timeout=LIMIT_S) == m.AgentStarted("a", "ray-a")
    checkpoints = CheckpointService(agents)
    data = DataMoves(agents, checkpoints, DataStore(tmp_path / "data"))
    launcher = Launcher(agents, ServerCodeArchives(tmp_path / "packages"), checkpoints, data)
    jobs = Jobs(store)
    keeping = LogPreservation(LogCopies(tmp_path / "kept", agents), agents, jobs)
    carrier = CommandExecutor(agents, launcher, told.put, keeping)
    yield carrier
    carrier.close()
    store.close()


def launch(number, place):
    return c.Launch(f"job-{number}", 1, ("a",), (), ({"CPU": 1.0},), "cpu", place)


def test_stops_and_fences_pass_while_every_launch_hangs(carrier, head, told):
    for number in range(LAUNCHES + 1):
        carrier.execute(launch(number, f"place-{number}"))
    wait_for(lambda: len(RAY._calls) == LAUNCHES)
    carrier.execute(c.Stop("a", "other", 1, "cancel"))
    assert told.get(timeout=LIMIT_S) == m.StopAnswered("a", "other", 1, "cancel")
    carrier.execute(c.Fence("other", 2, requested_s=7.0))
    assert told.get(timeout=LIMIT_S) == m.FenceAnswered("other", 2, 2, requested_s=7.0)


def test_a_raise_that_is_late_never_undoes_the_lower_after_it(carrier, head, told):
    """As when the head is frozen, and the silent node answers before it goes on."""
    head.stands["job"] = 1
    thawed = head.freeze("job")
    carrier.execute(c.Fence("job", 2, requested_s=1.0))
    wait_for(lambda: head.reads)
    carrier.execute(c.Fence("job", 1, lower=True))
    end = time.monotonic() + 0.3
    while len(head.reads) < 2 and time.monotonic() < end:  # the lower is to wait
        time.sleep(0.002)
    thawed.set()
    answers = {(a.epoch, a.current_epoch, a.error) for a in (told.get(timeout=LIMIT_S) for _ in range(2))}
    assert answers == {(2, 2, ""), (1, 1, "")}
    assert head.stands["job"] == 1


def test_of_the_raises_that_wait_for_a_late_one_the_newest_is_made(carrier, head, told):
    """One is commanded every few seconds, as long as there is no answer."""
    thawed = head.freeze("job")
    carrier.execute(c.Fence("job", 2, requested_s=0.0))
    wait_for(lambda: head.reads)
    for asked_s in (3.0, 6.0, 9.0):
        carrier.execute(c.Fence("job", 2, requested_s=asked_s))
    for asked_s in (3.0, 6.0):
        replaced = told.get(timeout=LIMIT_S)
        assert (replaced.requested_s, replaced.current_epoch) == (
            asked_s,
            0,
        ) and "has not answered yet" in replaced.error
    assert len(RAY._calls) == 1
    thawed.set()
    assert told.get(timeout=LIMIT_S) == m.FenceAnswered("job", 2, 2, requested_s=0.0)
    assert told.get(timeout=LIMIT_S) == m.FenceAnswered("job", 2, 2, requested_s=9.0)
    assert head.reads == ["job", "job"]


def test_the_fence_of_a_job_does_not_wait_for_that_of_another(carrier, head, told):
    head.freeze("frozen")
    carrier.execute(c.Fence("frozen", 2))
    wait_for(lambda: head.reads)
    carrier.execute(c.Fence("other", 2))
    assert told.get(timeout=LIMIT_S) == m.FenceAnswered("other", 2, 2)


def test_a_launch_that_did_not_get_its_fence_in_time_never_takes_it(carrier, head, told, monkeypatch):
    thawed = head.freeze("job")
    carrier.execute(c.Fence("job", 2))
    wait_for(lambda: head.reads)
    with monkeypatch.context() as short, pytest.raises(FleetError, match="has not answered yet"):
        short.setattr(fences, "LIMIT_S", 0.05)
        fences.acquire("job", 9, is_ours=False)
    thawed.set()
    assert told.get(timeout=LIMIT_S) == m.FenceAnswered("job", 2, 2)
    assert fences.acquire("job", 3, is_ours=False) == 0
    assert fences.acquire("job", 3, is_ours=False) == 3 == head.stands["job"]


def test_a_fence_of_a_cluster_that_was_left_is_not_written_in_the_next(carrier, head, told, monkeypatch):
    thawed = head.freeze("job")
    carrier.execute(c.Fence("job", 2))
    wait_for(lambda: head.reads)
    carrier.execute(c.Fence("job", 2))
    RAY.abandon()
    assert all("was left" in told.get(timeout=LIMIT_S).error for _ in range(2))
    carrier.execute(c.Fence("job", 1))
    assert told.get(timeout=LIMIT_S) == m.FenceAnswered("job", 1, 1)
    thawed.set()
    head.stopped["job"].join(LIMIT_S)
    assert not head.stopped["job"].is_alive()
    assert head.stands["job"] == 1


def test_what_waits_for_devices_that_another_call_holds_is_told_and_commanded_again(carrier, head, told, monkeypatch):
    monkeypatch.setattr(command_executor, "DEVICES_LOCK_S", 0.05)
    carrier.execute(launch(1, "place"))
    wait_for(lambda: len(RAY._calls) == 1)
    carrier.execute(c.Release("place"))
    released = told.get(timeout=LIMIT_S)
    assert released.reservation_name == "place" and "being reserved or released" in released.error
    carrier.execute(launch(2, "place"))
    failed = told.get(timeout=LIMIT_S)
    assert (failed.job, failed.kind, failed.maybe_started) == ("job-2", "launch", ())


def test_devices_can_be_used_again_once_their_cluster_was_left(carrier, head, told):
    """The head that did not answer is gone: whoever waited for it holds nothing any more."""
    carrier.execute(launch(1, "place"))
    wait_for(lambda: len(RAY._calls) == 1)
    RAY.abandon()
    failed = told.get(timeout=LIMIT_S)
    assert failed.job == "job-1" and "the cluster was left" in failed.message
    head.answers.set()
    carrier.execute(launch(2, "place"))
    assert told.get(timeout=LIMIT_S).message == "the test has ended"


def test_ray_has_threads_left_while_every_launch_hangs():
    assert ray_calls.MAX_THREADS > LAUNCHES + command_executor.RELEASES
