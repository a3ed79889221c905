"""Simulated users: the jobs that they submit, what these jobs do, and later requests."""

from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from orchestrator.core.controller import messages as m
from orchestrator.core.model import Candidate, Job, Recovery
from tests.simulator.quotas import choose_project
from workers.protocol.failure_kinds import FAILURE_KINDS

if TYPE_CHECKING:
    from tests.simulator.world import Simulation

KINDS = ("cpu", "tpu:v5e", "nvidia:A100-80GB")
MAX_OPEN_JOBS = 12
"""Maximum number of open jobs: a longer queue shows nothing new, and is slow."""
REPEAT_S = (1.0, 15.0, 90.0)
"""Seconds until a request is repeated: its job then waits, runs, or has ended."""
FAILURES = tuple(
    name
    for name, kind in FAILURE_KINDS.items()
    if kind.part_state == "failed" and name not in ("unreadable", "internal")
)
"""Failures of a job's code. `unreadable` has an event of its own, and `internal` follows the same rules as `user`."""


@dataclass(frozen=True, slots=True)
class Script:
    """What a job's code does.

    `work_s`: its work. `failures`: (start, node rank, seconds after, kind).

    `refused_rank`: node rank that cannot start its part because of a user's error; -1: none.
    """

    work_s: float
    failures: tuple[tuple[int, int, float, str], ...] = ()
    may_fail: bool = False
    secret_missing: bool = False
    runs: tuple[int, ...] = ()
    refused_rank: int = -1

    def failure(self, start: int, rank: int) -> tuple[float, str] | None:
        return next(((s, kind) for n, r, s, kind in self.failures if (n, r) == (start, rank)), None)


def candidate(rng: Random) -> Candidate:
    kinds = (rng.choice((*KINDS, "any")),) if rng.random() < 0.8 else tuple(rng.sample(KINDS, 2))
    count = rng.choice((1, 1, 1, 2, 4))
    min_count = rng.choice((1, count))
    return Candidate(
        kinds, count=count, min_count=min_count, nodes=rng.choice((1, 1, 1, 2, 2, 3)), exclusive=rng.random() < 0.08
    )


def recovery(rng: Random) -> Recovery:
    return Recovery(
        max_restarts=rng.choice((0, 0, 2, 5)),
        max_interruptions=rng.choice((-1, -1, -1, -1, 3)),
        backoff_s=rng.choice((0.5, 1.0)),
        lease_s=rng.choice((10.0, 10.0, 5.0, 20.0)),
        grace_s=rng.choice((2.0, 5.0, 10.0)),
        on_events={"user": "restart"} if rng.random() < 0.1 else {},
        cross_vendor=rng.random() < 0.8,
        on_disconnect=rng.choice(("restart",) * 8 + ("wait", "stop")),
    )


def make(rng: Random, number: int) -> tuple[Job, Script]:
    wants = tuple(candidate(rng) for _ in range(rng.choice((1, 1, 2))))
    job = Job(
        f"job-{number}",
        f"job-{number}",
        rng.choice(("run", "train")),
        wants,
        ordered=rng.random() < 0.5,
        priority=rng.choice((0, 0, 0, 5, 10)),
        submitted_s=rng.uniform(0, 1e9),
        recovery=recovery(rng),
    )
    failures: tuple[tuple[int, int, float, str], ...] = ()
    if rng.random() < 0.25:
        rank = rng.randrange(max(w.nodes for w in wants))
        failures = tuple((n, rank, rng.uniform(0.1, 4.0), rng.choice(FAILURES)) for n in range(rng.choice((1, 2))))
    wants_end = job.recovery.max_interruptions >= 0 or job.recovery.on_disconnect == "stop"
    missing = rng.random() < 0.1
    may_fail = bool(failures) or wants_end or missing
    return job, Script(rng.choice((0.5, 3.0, 12.0, 40.0, 90.0)), failures, may_fail, missing)


class Users:
    def __init__(self, world: "Simulation", jobs_per_s: float):
        self.world, self.mean_s = world, 1.0 / jobs_per_s
        self.number = 0
        self.waiting: list[Job] = []
        self.active = True

    def begin(self) -> None:
        self.world.after(1.0, self._submit)
        self.world.after(5.0, self._make_request)

    def _submit(self) -> None:
        if not self.active:
            return
        world, rng = self.world, self.world.rng
        world.after(rng.expovariate(1.0 / self.mean_s), self._submit)
        if len(world.server.control.records) >= MAX_OPEN_JOBS:
            return
        self.number += 1
        job, script = make(rng, self.number)
        job = replace(job, project=choose_project(world.projects, job))
        world.project_by_job[job.id] = job.project
        world.scripts[job.id] = self._maybe_refused(job, script)
        world.processes[job.id] = []
        self.send(job, rng.random() < 0.05)

    def _maybe_refused(self, job: Job, script: Script) -> Script:
        chance, rng = self.world.faults.start_refused, self.world.rng
        if not chance or rng.random() >= chance:
            return script
        rank = rng.randrange(max(want.nodes for want in job.candidates))
        return replace(script, refused_rank=rank, may_fail=True)

    def send(self, job: Job, twice: bool = False) -> None:
        """Submit a job, and repeat with the same key until it is acknowledged.

        `twice`: the response is lost, and the client repeats the request later.
        """
        if self.world.server.submit(job):
            self.world.acknowledged.add(job.id)
        else:
            self.world.after(2.0, self.send, job)
        if twice:
            self.world.after(self.world.rng.choice(REPEAT_S), self._send_again, job)

    def _send_again(self, job: Job) -> None:
        """Repeat a request, unless the store was restored to before it: it would then be a new job."""
        if job.id in self.world.acknowledged:
            self.send(job)

    def _make_request(self) -> None:
        if not self.active:
            return
        world, rng = self.world, self.world.rng
        world.after(rng.expovariate(1.0 / 6.0), self._make_request)
        control = world.server.control
        job = rng.choice(sorted(control.records)) if control.records else ""
        node = rng.choice(sorted(control.nodes)) if control.nodes else ""
        draw = rng.random()
        if draw < 0.45 and job:
            self.cancel(job)
        elif draw < 0.6 and job:
            world.moved.add(job)
            world.server.receive(m.MigrateRequested(job, (rng.choice(KINDS),)))
        elif draw < 0.8 and node:
            world.server.receive(m.DrainRequested(node, rng.choice(("", "service")), now=rng.random() < 0.5))
        elif node:
            world.server.receive(m.ResumeRequested(node))

    def cancel(self, job: str) -> None:
        """Cancel a job; it is acknowledged once its cycle is stored."""
        world = self.world
        acknowledge = lambda: world.checks.check_acknowledged(job, True)  # noqa: E731
        world.server.receive(m.CancelRequested(job), acknowledge)
        if world.rng.random() < 0.2:
            world.server.receive(m.CancelRequested(job), acknowledge)
