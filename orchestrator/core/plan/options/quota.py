"""Devices that a project holds of its quota, and its attempts beyond the quota, which borrow devices."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from cluster.catalogue import matches_pattern
from orchestrator.core.model import Candidate, Devices, Job, Project, Running
from orchestrator.core.plan.options.fit import minimum_count
from orchestrator.core.plan.options.gang import PlacementOption
from orchestrator.core.plan.options.quota_use import Holder, QuotaUse

DeviceCounts = Counter[tuple[str, str]]
"""Devices by (project, pattern of its quota)."""


@dataclass(frozen=True, slots=True)
class _Limit:
    """Quota of `most` devices of `pattern`: its project holds `held`; `reserved` are for a job ahead of this one."""

    pattern: str
    most: int
    held: int
    reserved: int

    @property
    def left(self) -> int:
        return self.most - self.held - self.reserved


class Quota:
    """Quotas of all projects, updated while a plan is made.

    A project that may not borrow never holds more than its quota, attempts that are stopping included. In one that may,
    only attempts within the quota count that are not stopping and not of lower priority than the job: those of lower
    priority become the borrowers when it starts.

    While `is_lending` is set, projects that may borrow have no limits; the planner then gives out only devices that no
    other job needs. One limit remains: quota for which a job of the same priority only waits for attempts that are
    stopping. A borrower would count against it in the next plan, and these attempts would have stopped in vain.
    """

    def __init__(self, projects: Mapping[str, Project], running: Iterable[Running]):
        self.projects, self.is_lending = projects, False
        self._held, self._freeing, self._reserved = DeviceCounts(), DeviceCounts(), DeviceCounts()
        self._reserved_for: dict[str, DeviceCounts] = {}
        self._needed_soon: set[tuple[tuple[str, str], int]] = set()
        self._use = {name: QuotaUse(project.quota) for name, project in projects.items()}
        self._borrowed: frozenset[str] | None = None if projects else frozenset()
        for attempt in running if projects else ():
            devices, position = self._devices_of([attempt]), (-attempt.priority, attempt.order, attempt.job)
            self._held += devices
            if not attempt.stopping:
                self._use_devices(devices, Holder(attempt.preemptible, *position))

    @property
    def borrowed(self) -> frozenset[str]:
        """Return the jobs of attempts beyond the quota of their project."""
        if self._borrowed is None:
            self._borrowed = frozenset[str]().union(*(use.borrowers() for use in self._use.values()))
        return self._borrowed

    def narrow(self, job: Job, want: Candidate, have: Devices, ending: Running | None = None) -> Candidate | None:
        """Return the candidate reduced to the quota left for devices like these, or None if that is too little.

        `ending`: an attempt of the job whose devices count as free.
        """
        limit = self._tightest(job, have.kind, ending)
        if limit is None:
            return want
        each = limit.left // want.nodes
        if each < minimum_count(want, have):
            return None
        return want if want.exclusive or want.count <= each else replace(want, count=each)

    def refusal_reason(self, job: Job, devices: int, kind: str, ending: Running | None = None) -> str:
        """Say why the job may not get `devices` of a kind, with its attempt `ending` counted as ended; else ""."""
        limit = self._tightest(job, kind, ending)
        if limit is None or devices <= limit.left:
            return ""
        key = job.project, limit.pattern
        message = f"project {job.project} holds {limit.held} of its {limit.most} {limit.pattern}"
        if self.projects[job.project].borrow and limit.held != self._held[key]:
            message = f"project {job.project} holds {self._held[key]} {limit.pattern}; {limit.held} of them count "
            message += f"against its quota of {limit.most} for a job of this priority"
        if limit.reserved:
            first = next(name for name, reserved in self._reserved_for.items() if reserved[key])
            message += f" ({limit.reserved} more reserved for {first}, which is ahead in the queue)"
        elif limit.held < limit.most:
            message += f", but the job needs {devices}"
        if not self.projects[job.project].borrow:
            return f"{message}, and the project may not borrow"
        return message + ("" if job.preemptible else ", and a job with preemptible: false may not borrow")

    def minimum_refusal(self, job: Job, want: Candidate, have: Devices) -> str:
        """Return `refusal_reason` for the smallest number of devices with which the candidate runs there."""
        return self.refusal_reason(job, minimum_count(want, have) * want.nodes, have.kind) if self.projects else ""

    def borrowing_note(self, job: Job, option: PlacementOption) -> str:
        """Say what the job would borrow with this option, or ""."""
        devices, kind = option.count * len(option.nodes), option.nodes[0].kind
        for pattern, most in self._quotas_for(job.project, kind):
            if (over := self._held[job.project, pattern] + devices - most) > 0:
                return f"borrows {min(over, devices)} beyond the {most} {pattern} of project {job.project}"
        return ""

    def is_within(self, job: Job, devices: int, kind: str, victims: Iterable[Running] = ()) -> bool:
        """Return True if the job may get `devices` after `victims` and stopping attempts have ended."""
        freed = self._devices_of(victim for victim in victims if self._counts(job, victim))
        own = self._reserved_for.get(job.id, DeviceCounts())
        for key, most in self._limits(job, kind):
            stopping = 0 if self.projects[job.project].borrow else self._freeing[key]
            if self._counted(job, key) - stopping - freed[key] + self._reserved[key] - own[key] + devices > most:
                return False
        return True

    def could_ever(self, job: Job, devices: int, kind: str) -> bool:
        """Return True if the project's quota is large enough for `devices` without borrowing."""
        return all(devices <= most for _, most in self._limits(job, kind))

    def allocate(self, job: Job, option: PlacementOption) -> None:
        devices = DeviceCounts()
        self._add(devices, job.project, option.nodes[0].kind, option.count * len(option.nodes))
        self._held += devices
        self._use_devices(devices, Holder(job.preemptible, -job.priority, job.number, job.id))

    def reserve(self, job: Job, kind: str, devices: int, *, soon: bool = False) -> None:
        """Reserve quota for a waiting job against later jobs of its project.

        `soon`: it only waits for attempts that are stopping, so the quota is reserved against borrowers, too.
        """
        for key, _ in self._limits(job, kind):
            self._reserve_for(job, key, devices, soon)

    def reserve_more(self, job: Job, kind: str, devices: int, ending: Running) -> None:
        """Reserve the part of `devices` that the job's attempt `ending` does not hold already."""
        held = self._devices_of([ending])
        for key, _ in self._limits(job, kind):
            self._reserve_for(job, key, max(0, devices - held[key]), soon=True)

    def count_as_stopping(self, attempt: Running) -> None:
        self._freeing += self._devices_of([attempt])
        if attempt.spec and attempt.spec.project in self._use:
            self._use[attempt.spec.project].remove(attempt.job)
            self._borrowed = None

    def holds(self, project: str, pattern: str) -> int:
        return self._held[project, pattern]

    @property
    def lends(self) -> bool:
        return any(project.borrow for project in self.projects.values())

    def may_borrow(self, job: Job) -> bool:
        """Return True if the job may exceed its project's quota; what it borrows must be returned, so it must stop."""
        return job.preemptible and job.project in self.projects and self.projects[job.project].borrow

    def counts_against(self, job: Job, attempt: Running, kind: str) -> bool:
        """Return True if the attempt holds devices that count against a quota of the job's project for this kind."""
        held = self._devices_of([attempt] if self._counts(job, attempt) else [])
        return any(held[key] for key, _ in self._limits(job, kind))

    def borrows_beside(self, attempt: Running, job: Job, devices: int, kind: str) -> bool:
        """Return True if the attempt borrows, or may do so once the job has `devices`. Others stop it then."""
        if attempt.job in self.borrowed or not self._outranks(job, attempt):
            return attempt.job in self.borrowed
        held = self._devices_of([attempt])
        return any(
            held[key] and self._held[key] - self._freeing[key] + devices > most for key, most in self._limits(job, kind)
        )

    def is_own_borrower(self, attempt: Running, job: Job) -> bool:
        """Return True if the attempt borrows and is of lower priority and of the same project as the job."""
        return attempt.job in self.borrowed and self._outranks(job, attempt)

    def must_return(self, attempt: Running, job: Job, kind: str) -> bool:
        """Return True if the attempt borrows and the job has a better right to such devices.

        That is the case if its project has a quota of them, or has no limit and the job's priority is not lower.
        """
        if attempt.job not in self.borrowed or not attempt.preemptible:
            return False
        is_other_project = attempt.spec is None or attempt.spec.project != job.project
        return is_other_project and (bool(self._quotas_for(job.project, kind)) or job.priority >= attempt.priority)

    def _tightest(self, job: Job, kind: str, ending: Running | None = None) -> _Limit | None:
        freed = self._devices_of([ending] if ending and self._counts(job, ending) else [])
        limits = [
            _Limit(key[1], most, self._counted(job, key) - freed[key], self._reserved[key])
            for key, most in self._limits(job, kind)
        ]
        return min(limits, key=lambda limit: limit.left, default=None)

    def _limits(self, job: Job, kind: str) -> list[tuple[tuple[str, str], int]]:
        limits = [((job.project, pattern), most) for pattern, most in self._quotas_for(job.project, kind)]
        if self.is_lending and self.may_borrow(job):
            return [limit for limit in limits if (limit[0], job.priority) in self._needed_soon]
        return limits

    def _quotas_for(self, project: str, kind: str) -> list[tuple[str, int]]:
        """Return the quotas of a project that apply to a kind."""
        if project not in self.projects:
            return []
        return [
            (pattern, most) for pattern, most in self.projects[project].quota.items() if matches_pattern(pattern, kind)
        ]

    def _use_devices(self, devices: DeviceCounts, holder: Holder) -> None:
        for project in {project for project, _ in devices}:
            by_pattern = {pattern: count for (_, pattern), count in devices.items()}
            self._use[project].add(replace(holder, devices=by_pattern))
            self._borrowed = None

    def _counted(self, job: Job, key: tuple[str, str]) -> int:
        """Return the devices that its project holds and that count against its quota for the job."""
        if self.projects[job.project].borrow:
            return self._use[job.project].counted(key[1], job.priority)
        return self._held[key]

    def _counts(self, job: Job, attempt: Running) -> bool:
        """Return True if the devices of an attempt of the job's project count against its quota for the job."""
        project = self.projects.get(job.project)
        return not (project and project.borrow) or not (attempt.job in self.borrowed or self._outranks(job, attempt))

    def _outranks(self, job: Job, attempt: Running) -> bool:
        """Return True if the attempt would become a borrower of the project, which may borrow, for the job."""
        is_own = attempt.spec is not None and attempt.spec.project == job.project and job.project in self.projects
        is_lower = attempt.preemptible and attempt.priority < job.priority
        return is_own and is_lower and self.projects[job.project].borrow

    def _devices_of(self, attempts: Iterable[Running]) -> DeviceCounts:
        totals = DeviceCounts()
        for attempt in attempts if self.projects else ():
            project, kind = attempt.spec.project if attempt.spec else "", attempt.allocation[0][0].partition("/")[2]
            self._add(totals, project, kind, sum(len(numbers) for _, numbers in attempt.allocation))
        return totals

    def _reserve_for(self, job: Job, key: tuple[str, str], devices: int, soon: bool) -> None:
        if soon and devices:
            self._needed_soon.add((key, job.priority))
        self._reserved[key] += devices
        self._reserved_for.setdefault(job.id, DeviceCounts())[key] += devices

    def _add(self, to: DeviceCounts, project: str, kind: str, devices: int) -> None:
        for pattern, _ in self._quotas_for(project, kind):
            to[project, pattern] += devices


@dataclass(frozen=True, slots=True)
class Holding:
    """Use of one quota. `kind` is "" and `quota` None for a project without quota. `borrow`: it may exceed it."""

    project: str
    kind: str
    quota: int | None
    held: int | None
    borrowed: int
    borrow: bool


def holdings(projects: Mapping[str, Project], running: Iterable[Running]) -> list[Holding]:
    """Return the use of all quotas by project and kind."""
    quota, rows = Quota(projects, running), []
    for name, project in sorted(projects.items()):
        if not project.quota:
            rows.append(Holding(name, "", None, None, 0, project.borrow))
        for kind, most in project.quota.items():
            held = quota.holds(name, kind)
            rows.append(Holding(name, kind, most, held, max(0, held - most), project.borrow))
    return rows
