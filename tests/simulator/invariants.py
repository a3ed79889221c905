"""Laws that every world must obey after every step.

Their names and sentences are those of docs/simulator.md.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from cluster.catalogue import matches_pattern
from orchestrator.core.attempt.invariants import find_contradictions
from orchestrator.core.controller.attempts import AttemptState
from orchestrator.core.controller.commands import Command, Stop, StoreReport
from orchestrator.core.controller.draft import Control
from orchestrator.core.controller.messages import LaunchFailed, Message
from orchestrator.core.controller.nodes import EVENTS as OF_NODES
from orchestrator.core.jobs.fold import Record, apply, ignored_reason
from orchestrator.core.model import Event, Job
from orchestrator.core.states import TERMINAL, State
from tests.simulator.attempt import SimulatedAttempt
from tests.simulator.overdue_flags import TimeLimits
from tests.simulator.quotas import beyond_quota
from tests.simulator.state_changes import Problem, find_phase_regressions

if TYPE_CHECKING:
    from tests.simulator.machine import SimulatedNode
    from tests.simulator.world import Simulation

SENTENCES = {
    "I0": "no message makes the controller fail",
    "I1": "every allocated device exists, and is free again once its attempt has ended",
    "I2": "a device belongs to at most one attempt, in the log and in the simulated world",
    "I3": "an attempt holds all the devices of its candidate, in one pool, or none",
    "I4": "at most one attempt of a job runs; its epochs grow, and none is used twice",
    "I5": "no report, checkpoint or end of an older epoch is applied",
    "I6": "an acknowledged job is in the store; its end is final; only moves of the state table happen",
    "I7": "a message that comes twice or late changes nothing that is stored",
    "I8": "the controller's records equal the fold of the log",
    "I9": "a crash at any point leads to the same ends as no crash",
    "I10": "a placement meets its candidate's constraints, on nodes that take work",
    "I11": "only lower priorities, trainings with a checkpoint, and borrowers are preempted, after their grace",
    "I12": "the newest checkpoint never becomes an older one",
    "I13": "a project that may not borrow holds at most its quota, and only borrowed devices are reclaimed",
    "I14": "no decision depends on wall clocks",
    "I15": "an ended job's attempts have all ended, each with an outcome",
    "I16": "after an acknowledged cancel nothing of the job is placed",
    "I17": "a node of which Ray has lost count is restarted only if nothing runs on it",
    "I18": "the controller's state of an attempt is consistent",
    "I19": "a fence that the controller raised itself is never mistaken for that of a newer attempt",
    "I20": "devices that count as released are not reserved in Ray",
    "I21": "the phase of a part never returns to an earlier one",
    "I22": "a job with a user's error at launch ends and is not started again",
    "I23": "each change of an attempt, a part or a stop request, and each command for it, is a row of its table",
    "L1": "every job ends, or waits with a reason",
    "L2": "a job fails only if its own code or its user's request makes it fail",
    "L3": "nothing is left: attempts, reservations, untracked attempts, reports of ended attempts",
    "L4": "every healthy node takes work",
    "L5": "no job is preempted again and again for one that never starts",
    "L6": "retries stay within their budgets",
    "L7": "no job waits while devices that fit it are idle",
    "P7": "a new job succeeds",
    "R4": "the controller reacts to a silent node within 20 s",
    "R5": "a fence is above a current attempt for at most 30 s",
    "R6": "a cut-off no longer explains failures once the attempt's nodes have answered for 10 s",
    "R7": "an attempt that keeps running after its cancel is reported",
}

MAX_SILENT_S = 20.0


def may_be_preempted_by_equal(record: Record) -> bool:
    """Whether a job may be stopped for one of equal priority, independent of the code under test."""
    saved = record.job.task == "train" and record.checkpoint is not None
    return saved and record.job.recovery.max_interruptions == -1


MAX_PREEMPTIONS = 5


@dataclass(frozen=True, slots=True)
class Violation:
    name: str
    what: str
    at_s: float
    job: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({SENTENCES[self.name]}) is broken at {self.at_s:.3f} s: {self.job} {self.what}"


class Broken(Exception):
    """A law is broken; ends the world at once."""

    def __init__(self, violation: Violation):
        super().__init__(str(violation))
        self.violation = violation


class Checks:
    """Checks of the laws, called with everything that happens, in order. Methods raise Broken."""

    def __init__(self, world: "Simulation"):
        self.world = world
        self.allocation: dict[tuple[str, int], str] = {}
        self.preemptions: dict[tuple[str, str], int] = {}
        self.launch_of_epoch: dict[tuple[str, int], int] = {}
        self.user_errors: dict[str, int] = {}
        self.overdue = TimeLimits(world)
        self.unchecked: frozenset[str] = frozenset()
        """Laws about the controller's fields that a test leaves out, to see what follows from a bug in the world."""

    def broken(self, name: str, job: str, problem: str) -> None:
        if name not in self.unchecked:
            raise Broken(Violation(name, problem, self.world.now_s, job))

    def failed(self, message: Message, error: Exception) -> NoReturn:
        job = getattr(message, "job", "")
        raise Broken(Violation("I0", f"{message} raises {error!r}", self.world.now_s, job)) from error

    def restored(self) -> None:
        """Take over the allocations of an older log that was restored."""
        self.allocation = {
            (devices_id, number): record.job.id
            for record in self.world.store.records.values()
            if record.live_attempt
            for devices_id, numbers in record.live_attempt.allocation
            for number in numbers
        }

    def check_transaction(self, events: Sequence[Event], before: Mapping[str, Record | None]) -> None:
        """Check a transaction. `before`: the records of its jobs before it."""
        records = dict(before)
        for event in events:
            if event.event in OF_NODES:
                continue
            previous = records.get(event.job)
            if reason := ignored_reason(previous, event):
                self.broken("I6", event.job, f"event {event.event} was stored and does not count: {reason}")
            records[event.job] = after = apply(previous, event)
            if previous is not None and after is not None:
                self._check_event(event, previous, after)

    def _check_event(self, event: Event, before: Record, after: Record) -> None:
        if before.job.state in TERMINAL and after.job.state is not before.job.state:
            self.broken("I6", event.job, f"{before.job.state} became {after.job.state} by {event.event}")
        if event.event == "placed":
            self._check_placed(event, after)
        elif event.event == "preempted" and "by" in event.data:
            self._preempted(event, before)
        elif event.event == "checkpoint" and before.checkpoint and before.checkpoint["step"] > event.data["step"]:
            self.broken("I12", event.job, f"checkpoint {event.data['step']} replaces {before.checkpoint['step']}")
        if before.live_attempt is not None and after.live_attempt is None:
            self._check_freed(before)

    def _check_freed(self, before: Record) -> None:
        assert before.live_attempt is not None
        for devices_id, numbers in before.live_attempt.allocation:
            for number in numbers:
                if self.allocation.pop((devices_id, number), None) != before.job.id:
                    self.broken("I1", before.job.id, f"{devices_id} [{number}] was released although it was not held")

    def _check_placed(self, event: Event, record: Record) -> None:
        job, world = record.job, self.world
        self.preemptions = (
            {pair: count for pair, count in self.preemptions.items() if pair[0] != job.id} if self.preemptions else {}
        )
        if job.id in world.cancelled:
            self.broken("I16", job.id, "was placed after its cancel was acknowledged")
        if self.user_errors.get(job.id) == world.server.life and job.id not in world.unreadable:
            self.broken("I22", job.id, "is placed again after a user's error that a new start cannot fix")
        for devices_id, numbers in record.attempts[-1].allocation:
            for number in numbers:
                if holder := self.allocation.get((devices_id, number)):
                    self.broken("I2", job.id, f"{devices_id} [{number}] is allocated to {holder}")
                self.allocation[devices_id, number] = job.id
        self._check_quota(job)

    def _check_quota(self, job: Job) -> None:
        project = self.world.projects.get(job.project)
        if project and not project.borrow and (problem := self._beyond_quota(job.project)):
            self.broken("I13", job.id, f"is placed, and {problem}")

    def _beyond_quota(self, project: str) -> str:
        world = self.world
        if project not in world.projects:
            return ""
        return beyond_quota(project, world.projects[project], world.project_by_job, self.allocation)

    def check_state(self, control: Control, changes: Iterable[Problem]) -> None:
        """Check the controller's state after a step. `changes`: those in the step that no table explains."""
        for job, problem in changes:
            self.broken("I23", job, problem)
        for job, problem in find_contradictions(control):
            self.broken("I18", job, problem)

    def check_step(
        self, before: Control, events: Sequence[Event], commands: Sequence[Command], control: Control
    ) -> None:
        """Check one step. `before`, `control`: state before and after it."""
        for event in events:
            if event.event == "placed":
                self._check_placement(event, control.records[event.job], before)
            elif event.event == "refused":
                self._check_refused(event, before)
            elif event.event == "overtaken" and not event.data["node"]:
                self._raised_by_others(event)
        for command in commands:
            if isinstance(command, StoreReport):
                self._reported(command, before)
            elif isinstance(command, Stop) and command.how != "preempt":
                self._cancelled(command, control)

    def _raised_by_others(self, event: Event) -> None:
        ray, life, epoch = self.world.ray, self.world.server.life, int(event.data["seen"])
        if ray.fences.get(event.job) == epoch and ray.raised_by.get(event.job) == life:
            self.broken("I19", event.job, f"its fence is at {epoch}, where this server raised it")

    def _check_refused(self, event: Event, before: Control) -> None:
        """Check that a refused job cannot run on any live machine in the controller's state."""
        job, live_ray_ids = (
            before.records[event.job].job,
            {node.ray_id for node in before.nodes.values() if not node.lost_reason},
        )
        machines = [machine for machine in self.world.machines if machine.ray_id in live_ray_ids]
        for want in job.candidates:
            able = [machine.label for machine in machines if machine.could_run(job, want)]
            if want.nodes == 1 and able:
                self.broken("L2", job.id, f"is refused, though {able} could run {want}")

    def _cancelled(self, command: Stop, control: Control) -> None:
        record, attempt = control.records.get(command.job), control.attempts.get(command.job)
        if record is None or attempt is None or attempt.epoch != command.epoch or record.job.state is not State.SAVING:
            return
        has_no_failure = all(not p.outcome or p.outcome.state in ("preempted", "succeeded") for p in attempt.parts)
        if (
            has_no_failure
            and not attempt.superseded_reason
            and not any(p.doubt or p.unreadable_reason for p in attempt.parts)
        ):
            self.broken("I11", command.job, f"is cancelled on {command.node} within the grace of its preemption")

    def check_silence(self) -> None:
        """Check, every few seconds, that the controller has not waited too long for a silent node."""
        self.overdue.check()
        server = self.world.server
        now_s, control = server.now().s, server.control
        if not (server.up and not server.frozen and control.is_joined and now_s - control.ticked_s < 2.0):
            return
        for attempt in control.attempts.values():
            job = control.records[attempt.job].job
            if attempt.state is AttemptState.LAUNCHING or attempt.raised_fence or job.recovery.on_disconnect == "wait":
                continue
            for part in attempt.parts:
                node = control.nodes.get(part.node)
                last_contact_s = max(node.last_contact_s if node else -1e9, attempt.since_s)
                silent_s, has_acted = (
                    now_s - last_contact_s,
                    attempt.cut_off is not None and attempt.cut_off.until_s is None,
                )
                if part.outcome is None and silent_s > MAX_SILENT_S and not has_acted:
                    self.broken("R4", attempt.job, f"{part.node} is silent for {silent_s:.0f} s without a reaction")

    def _check_placement(self, event: Event, record: Record, before: Control) -> None:
        attempt = record.attempts[-1]
        want = record.job.candidates[attempt.candidate]
        counts = {len(set(numbers)) for _, numbers in attempt.allocation}
        is_allowed_count = want.exclusive or want.min_count <= min(counts) <= want.count
        if len(attempt.allocation) != want.nodes or len(counts) != 1 or not is_allowed_count:
            self.broken("I3", event.job, f"holds {attempt.allocation} for {want}")
        for devices_id, numbers in attempt.allocation:
            name, _, kind = devices_id.partition("/")
            node = before.nodes.get(name)
            facts = node.facts if node and not node.lost_reason else None
            if facts is None or facts.pool != attempt.pool or max(numbers) >= len(facts.devices):
                self.broken("I10", event.job, f"{devices_id} {numbers} is not in pool {attempt.pool}, or is lost")
                return
            if want.exclusive and len(numbers) != len(facts.devices):
                self.broken("I3", event.job, f"holds {numbers} of {devices_id}, but requested full nodes")
            if not any(pattern == "any" or matches_pattern(pattern, kind) for pattern in want.kinds):
                self.broken("I10", event.job, f"{kind} is not one of {want.kinds}")
            if name in before.drained:
                self.broken("I10", event.job, f"{devices_id} is drained")

    def _preempted(self, event: Event, victim: Record) -> None:
        by = self.world.server.control.records.get(event.data["by"])
        equal = by is not None and by.job.priority == victim.job.priority and may_be_preempted_by_equal(victim)
        is_other = by is not None and by.job.project != victim.job.project
        is_reclaimed = is_other and bool(self._beyond_quota(victim.job.project))
        if by is not None and by.job.priority <= victim.job.priority and not (equal or is_reclaimed):
            self.broken("I11", event.job, f"priority {victim.job.priority} was preempted by priority {by.job.priority}")
        pair = (event.data["by"], event.job)
        self.preemptions[pair] = self.preemptions.get(pair, 0) + 1
        if self.preemptions[pair] > MAX_PREEMPTIONS:
            self.broken("L5", event.job, f"was preempted {MAX_PREEMPTIONS} times for {pair[0]}, which never started")

    def check_cycle(
        self, before: Control, control: Control, messages: Iterable[Message], events: Sequence[Event]
    ) -> None:
        """Check changes of the controller's state, also against the store for each job with an event in this cycle."""
        store = self.world.store
        self._note_user_errors(before, messages)
        for job, problem in find_phase_regressions(before.attempts, control.attempts):
            self.broken("I21", job, problem)
        self._released(before, control)
        for job in {event.job for event in events if event.event not in OF_NODES}:
            stored, held = store.records[job], control.records.get(job)
            is_open = stored.job.state not in TERMINAL or stored.live_attempt is not None
            if is_open != (held is not None):
                self.broken("I8", job, f"the store has {stored.job.state}, the controller {held and held.job.state}")
            if held is not None and replace(held, seq=0) != replace(stored, seq=0):
                self.broken("I8", job, f"the store has {stored}, the controller {held}")
            if (held is not None and held.live_attempt is not None) != (job in control.attempts):
                self.broken("I8", job, "its attempt is not in the controller's table")

    def _note_user_errors(self, before: Control, messages: Iterable[Message]) -> None:
        """Note launches that failed for a user's error. A server that starts later does not know of them."""
        for message in messages:
            if isinstance(message, LaunchFailed) and message.kind == "user":
                attempt = before.attempts.get(message.job)
                if attempt is not None and attempt.state is AttemptState.LAUNCHING and attempt.epoch == message.epoch:
                    self.user_errors[message.job] = self.world.server.life

    def _released(self, before: Control, control: Control) -> None:
        if released := before.pending_releases.keys() - control.pending_releases.keys():
            used = {attempt.allocation_name for attempt in control.attempts.values()}
            for name in sorted((released - used) & self.world.ray.reserved.keys()):
                self.broken("I20", "", f"{name} counts as released but is reserved in Ray")

    def check_start(self, attempt: SimulatedAttempt) -> None:
        """Check processes of an attempt that start on a node."""
        job, world = attempt.job, self.world
        if self.launch_of_epoch.setdefault((job, attempt.epoch), attempt.number) != attempt.number:
            self.broken("I4", job, f"epoch {attempt.epoch} runs a second time, on {attempt.machine.label}")
        for other in world.running_attempts():
            if other is attempt or other.is_exempt(world.now_s):
                continue
            if other.job == job and other.epoch != attempt.epoch:
                self.broken("I4", job, f"{attempt.key} on {attempt.machine.label} starts while {other.key} runs")
            if other.machine is attempt.machine and set(other.devices) & set(attempt.devices):
                self.broken("I2", job, f"{attempt.key} and {other.key} use the same devices of {other.machine.label}")

    def check_alone(self, attempt: SimulatedAttempt) -> None:
        """Check, some time after an attempt was thawed, that it has ended if it is stale."""
        now_s = self.world.now_s
        for other in self.world.processes.get(attempt.job, ()) if not attempt.is_exempt(now_s) else ():
            if other.epoch > attempt.epoch and not other.is_exempt(now_s):
                self.broken("I4", attempt.job, f"{attempt.key} was thawed and still runs beside {other.key}")

    def check_restart(self, machine: "SimulatedNode") -> None:
        """Check that nothing runs on a machine that is about to be restarted."""
        records = self.world.store.records
        for attempt in machine.attempts.values():
            stored = records[attempt.job].live_attempt if attempt.job in records else None
            if not attempt.ended and stored is not None and stored.epoch == attempt.epoch:
                self.broken("I17", attempt.job, f"{attempt.key} runs on {machine.label}")

    def check_commit(self, attempt: SimulatedAttempt) -> None:
        """Check that `attempt` was current when it committed a checkpoint."""
        for other in self.world.processes.get(attempt.job, ()):
            if other.epoch > attempt.epoch and not other.is_exempt(self.world.now_s):
                self.broken("I5", attempt.job, f"{attempt.key} commits a checkpoint while {other.key} runs")

    def _reported(self, command: StoreReport, held: Control) -> None:
        """Check a stored report. `held`: the controller's state when it received the report."""
        record = held.records.get(command.job)
        if record is None or record.job.epoch != command.epoch:
            self.broken("I5", command.job, f"a report of epoch {command.epoch} is stored, but the job is at {record}")

    def check_acknowledged(self, job: str, cancelled: bool) -> None:
        record = self.world.store.records.get(job)
        if record is None:
            if job in self.world.acknowledged:
                self.broken("I6", job, "was acknowledged but is not in the store")
        elif cancelled and record.job.state not in TERMINAL:
            self.broken("I16", job, f"its cancel was acknowledged, but it is {record.job.state}")
        elif cancelled and record.job.state is State.CANCELLED:
            self.world.cancelled.add(job)
