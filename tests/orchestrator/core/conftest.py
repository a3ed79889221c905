"""A small mixed fleet and short ways to write its parts."""

from dataclasses import replace

import pytest

from cluster.types import Device, NodeFacts
from orchestrator.core.attempt.invariants import check
from orchestrator.core.attempt.story import lines_of
from orchestrator.core.controller import commands as commands_
from orchestrator.core.controller import messages as m
from orchestrator.core.controller.draft import Control
from orchestrator.core.controller.messages import Now
from orchestrator.core.jobs.fold import apply, submitted
from orchestrator.core.model import Candidate, Devices, Job, Running, Snapshot
from orchestrator.core.step.placement import MIN_INTERVAL_S
from tests.simulator.state_changes import StateWatch
from workers.protocol.messages import PROTOCOL, AttemptStatus, Failure, Outcome

GiB = 2**30


class Words:
    """`w.devices("h100-0", 8)`, `w.job("big", count=8)`: only what a test is about is written down."""

    GiB = GiB

    def devices(self, node, total=1, *, free=None, kind="nvidia:H100-80GB", pool="h100", memory_gib=80, **more):
        numbers = tuple(range(total)) if free is None else tuple(free)
        backend = kind.partition(":")[0]
        had = Devices(f"{node}/{kind}", node, pool, pool, backend, kind, numbers, total, memory_gib * GiB)
        return replace(had, **more)

    def cpu(self, node="cpu-0", total=1, **more):
        return self.devices(node, total, kind="cpu", pool="cpu", **more)

    def ipex(self, node="ipex-0", total=1, **more):
        return self.devices(node, total, kind="cpu:ipex", pool="ipex", **more)

    def xla(self, node="xla-0", total=1, **more):
        return self.devices(node, total, kind="tpu:emulated", pool="xla", emulated=True, **more)

    def v5e(self, node="v5e-0", total=4, **more):
        return self.devices(node, total, **({"kind": "tpu:v5e", "pool": "v5e", "memory_gib": 16} | more))

    def want(self, *kinds, count=1, **more):
        return Candidate(kinds or ("nvidia:H100",), **({"count": count, "min_count": count} | more))

    def job(self, name, *candidates, count=1, **more):
        return Job(name, name, "train", candidates or (self.want(count=count),), **more)

    def running(self, job, *leases, priority=0, order=0, **more):
        return Running(job, priority, order, leases, **more)

    def snapshot(self, devices, jobs, running=(), now_s=100.0, **more):
        return Snapshot(now_s, tuple(devices), tuple(jobs), tuple(running), wall_s=now_s, **more)


@pytest.fixture
def w():
    return Words()


class Controller:
    """A controller told one message after another. `tell` answers with what it stores and commands."""

    def __init__(self, w):
        self.w, self.s, self.wall_s, self.control = w, 1000.0, 5e8, Control()
        self.number, self.watch, self.lines = 0, StateWatch(), []
        self.tell(m.ClusterJoined())

    def tell(self, message, after_s=0.0):
        """(events as (job, event, epoch), commands), `after_s` seconds later. An answer is of the newest command,
        unless it says of when it is; in commands that time is left out.
        """
        self.s += after_s
        if isinstance(message, m.FenceAnswered | m.StopAnswered | m.ReleaseAnswered) and not message.requested_s:
            message = replace(message, requested_s=self.s)
        done = self.watch.step(self.control, message, Now(self.s, self.wall_s))
        self.control, self.events = done.control, done.events
        self.lines += lines_of([message], done.control.messages, done.transitions, done.commands, self.wall_s)
        assert (self.watch.take_problems(), check(self.control)) == ([], [])
        timed = commands_.Fence | commands_.Stop | commands_.Release
        commands = [replace(x, requested_s=0.0) if isinstance(x, timed) else x for x in done.commands]
        return [(e.job, e.event, e.epoch) for e in done.events], commands

    def tick(self, after_s=0.0, **told):
        """As time passes: in steps of a second, so that nothing looks like a process that was stopped. Answers as
        `tell` does, for all of them together.
        """
        events, commands, stored = [], [], []
        while after_s > 1.0:
            more = self.tick(1.0, **told)
            events, commands, after_s = events + more[0], commands + more[1], after_s - 1.0
            stored += self.events
        more = self.tell(m.Tick(**told), max(after_s, MIN_INTERVAL_S))
        self.events = (*stored, *self.events)
        return events + more[0], commands + more[1]

    def node(self, name, count=1, kind="cpu", pool=None):
        """A node joins, its agent is made, and tells that nothing runs there."""
        pool = pool or kind.partition(":")[0]
        alive = [m.ListedNode(n.ray_id, n.name, pool=n.pool) for n in self.control.nodes.values() if not n.lost_reason]
        self.tell(m.NodesListed((*alive, m.ListedNode(f"ray-{name}", name, pool=pool))))
        self.tell(m.AgentStarted(name, f"ray-{name}"))
        self.hear(name, facts=facts(name, count, kind, pool))
        self.hear(name)

    def hear(self, name, *reports, there=None, after_s=0.0, **more):
        """A node's answer: everything that is followed there is there, unless `there` says what is."""
        if there is None:
            live = [
                (live, rank, part) for live in self.control.attempts.values() for rank, part in enumerate(live.parts)
            ]
            there = [live.part_key(rank) for live, rank, part in live if part.node == name]
        ray_id = more.pop("ray_id", f"ray-{name}")
        told = {"requested_s": self.s + after_s, "attempts": frozenset(there), **more}
        return self.tell(m.Heartbeat(name, ray_id, reports=reports, **told), after_s)

    def hear_all(self, *names, seconds, every_s=2.0):
        """These nodes answer and time passes. Answers as `tell` does."""
        events, commands = [], []
        for _ in range(int(seconds / every_s)):
            for name in names:
                self.hear(name)
            told = self.tick(every_s)
            events, commands = events + told[0], commands + told[1]
        return events, commands

    def submit(self, job):
        self.number += 1
        stored = replace(submitted(job, {}, self.wall_s), seq=self.number)
        return self.tell(m.Submitted((apply(None, stored),)))

    def place(self, job):
        """Submitted, placed, and its launch under way. The Launch."""
        self.submit(job)
        _, commands = self.tick()
        [launch] = [c for c in commands if isinstance(c, commands_.Launch) and c.job == job.id]
        return launch

    def run(self, job):
        """Submitted, placed, started on every node. The Launch."""
        launch = self.place(job)
        self.tell(m.Launched(job.id, launch.epoch))
        for rank, node in enumerate(launch.nodes):
            self.hear(node, report(job.id, launch.epoch, rank, "running"))
        assert self.state(job.id) == "RUNNING"
        return launch

    def state(self, job):
        """Its state; "" once it is closed: ended, with nothing of it left."""
        return str(self.control.records[job].job.state) if job in self.control.records else ""


def facts(name, count=1, kind="cpu", pool="cpu"):
    backend = kind.partition(":")[0]
    devices = tuple(Device(backend, kind, i, kind, total_memory_bytes=80 * GiB) for i in range(count))
    here = (name, f"ray-{name}", "host", "10.0.0.1", pool, backend, pool, PROTOCOL, {}, devices, 8)
    return NodeFacts(*here, GiB, GiB, 0.0, GiB, 1, "/store")


def report(job, epoch, rank=0, phase="running", *events, cursor=0, outcome=None):
    return AttemptStatus(job, epoch, rank, phase, events, cursor, outcome)


def ended(job, epoch, rank=0, state="succeeded", kind="", message="", codes=None, node="a"):
    failure = Failure(rank, node, kind, message) if kind else None
    outcome = Outcome(job, epoch, rank, state, codes or {}, failure)
    return AttemptStatus(job, epoch, rank, "ended", (), 0, outcome)


class Told:
    """Short ways to write what agents tell."""

    report = staticmethod(report)
    ended = staticmethod(ended)
    facts = staticmethod(facts)


@pytest.fixture
def c(w):
    return Controller(w)


@pytest.fixture
def t():
    return Told


@pytest.fixture
def gang(c, w):
    """Job g runs on nodes a and b."""
    c.node("a")
    c.node("b")
    c.run(w.job("g", w.want("cpu", nodes=2)))
    return c
