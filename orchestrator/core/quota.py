"""How many devices a project holds of its quota, and which of its attempts hold more than that: borrowed ones."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from cluster.catalogue import matches_pattern
from orchestrator.core.fit import least
from orchestrator.core.gang import Option
from orchestrator.core.model import Candidate, Devices, Job, Running
from orchestrator.core.policy import Project

Held = Counter[tuple[str, str]]
"""Devices by (project, pattern of its quota)."""


@dataclass(frozen=True, slots=True)
class _Limit:
    """Of `most` devices of `pattern` the project holds `held`, and `kept` are for a job of it that goes first."""

    pattern: str
    most: int
    held: int
    kept: int

    @property
    def left(self) -> int:
        return self.most - self.held - self.kept


class Quota:
    """Kept up to date while a plan is made. Attempts that stop hold their devices until they have ended. While `lent`,
    projects that may borrow have no limits: then only what nobody else wants is left.
    """

    def __init__(self, projects: Mapping[str, Project], running: Iterable[Running]):
        self.projects, self.lent = projects, False
        attempts = sorted(running, key=lambda r: (-r.priority, r.order, r.job)) if projects else []
        self._held, self._soon, self._kept = Held(), Held(), Held()
        self._kept_for: dict[str, Held] = {}
        self.borrowed = frozenset(r.job for r in attempts if self._counts(r))

    def narrowed(self, job: Job, want: Candidate, have: Devices, gives: Running | None = None) -> Candidate | None:
        """What `job` may still have of devices like these, once its attempt `gives` has ended; None where that is
        nothing.
        """
        limit = self._tightest(job, have.kind, gives)
        if limit is None:
            return want
        each = limit.left // want.nodes
        if each < least(want, have):
            return None
        return want if want.exclusive or want.count <= each else replace(want, count=each)

    def refusal(self, job: Job, devices: int, kind: str, gives: Running | None = None) -> str:
        """Why it may not have so many of a kind, beside all that runs but its attempt `gives`; or ""."""
        limit = self._tightest(job, kind, gives)
        if limit is None or devices <= limit.left:
            return ""
        told = f"project {job.project} holds {limit.held} of its {limit.most} {limit.pattern}"
        if limit.kept:
            key = job.project, limit.pattern
            first = next(name for name, kept in self._kept_for.items() if kept[key])
            told += f", {limit.kept} more kept for {first}, which goes first"
        elif limit.held < limit.most:
            told += f", job needs {devices}"
        return told + ("" if self.projects[job.project].borrow else " and may not borrow")

    def needs(self, job: Job, want: Candidate, have: Devices) -> str:
        """`refusal` of the fewest devices with which it runs there."""
        return self.refusal(job, least(want, have) * want.nodes, have.kind) if self.projects else ""

    def beyond(self, job: Job, option: Option) -> str:
        """What a job borrows that gets this; "" where it borrows nothing."""
        devices, kind = option.count * len(option.nodes), option.nodes[0].kind
        for pattern, most in self._of(job.project, kind):
            if (over := self._held[job.project, pattern] + devices - most) > 0:
                return f"borrows {min(over, devices)} beyond the {most} {pattern} of project {job.project}"
        return ""

    def within(self, job: Job, devices: int, kind: str, victims: Iterable[Running] = ()) -> bool:
        """Whether it may have so many once `victims`, and those that stop already, have ended: its project then holds
        no more than its quota, or than it holds now.
        """
        freed, own = self._of_attempts(victims), self._kept_for.get(job.id, Held())
        for key, most in self._limits(job, kind):
            now = self._held[key] - self._soon[key]
            if now - freed[key] + self._kept[key] - own[key] + devices > max(most, now):
                return False
        return True

    def could_ever(self, job: Job, devices: int, kind: str) -> bool:
        """Whether its project may hold so many at all, without borrowing."""
        return all(devices <= most for _, most in self._limits(job, kind))

    def take(self, job: Job, option: Option) -> None:
        self._add(self._held, job.project, option.nodes[0].kind, option.count * len(option.nodes))

    def keep(self, job: Job, kind: str, devices: int) -> None:
        """For a job that waits: those of its project that come after it do not get them."""
        for key, _ in self._limits(job, kind):
            self._keep(job, key, devices)

    def keep_more(self, job: Job, kind: str, devices: int, gives: Running) -> None:
        """Of `devices` what its attempt does not hold already."""
        given = self._of_attempts([gives])
        for key, _ in self._limits(job, kind):
            self._keep(job, key, max(0, devices - given[key]))

    def stops(self, attempt: Running) -> None:
        self._soon += self._of_attempts([attempt])

    def holds(self, project: str, pattern: str) -> int:
        return self._held[project, pattern]

    @property
    def lends(self) -> bool:
        return any(project.borrow for project in self.projects.values())

    def may_borrow(self, job: Job) -> bool:
        return job.project in self.projects and self.projects[job.project].borrow

    def is_of(self, job: Job, attempt: Running, kind: str) -> bool:
        """Whether the attempt holds devices of a quota that the job's project has of a kind."""
        held = self._of_attempts([attempt])
        return any(held[key] for key, _ in self._limits(job, kind))

    def gives_back(self, attempt: Running, job: Job, kind: str) -> bool:
        """Whether the attempt has borrowed, and the job has more right to such devices: its project has a quota of
        them, or nobody limits it and it is of no lower priority.
        """
        if attempt.job not in self.borrowed or not attempt.preemptible or self.lent:
            return False
        other = attempt.asked is None or attempt.asked.project != job.project
        return other and (bool(self._of(job.project, kind)) or job.priority >= attempt.priority)

    def _tightest(self, job: Job, kind: str, gives: Running | None = None) -> _Limit | None:
        given = self._of_attempts([gives]) if gives else Held()
        limits = [
            _Limit(key[1], most, self._held[key] - given[key], self._kept[key]) for key, most in self._limits(job, kind)
        ]
        return min(limits, key=lambda limit: limit.left, default=None)

    def _limits(self, job: Job, kind: str) -> list[tuple[tuple[str, str], int]]:
        if self.lent and self.may_borrow(job):
            return []
        return [((job.project, pattern), most) for pattern, most in self._of(job.project, kind)]

    def _of(self, project: str, kind: str) -> list[tuple[str, int]]:
        """Its quotas of such a kind."""
        if project not in self.projects:
            return []
        return [
            (pattern, most) for pattern, most in self.projects[project].quota.items() if matches_pattern(pattern, kind)
        ]

    def _counts(self, attempt: Running) -> bool:
        """Whether with this attempt its project is beyond its quota: the most urgent count first, then the oldest."""
        held = self._of_attempts([attempt])
        self._held += held
        return any(self._held[key] > self.projects[key[0]].quota[key[1]] for key in held)

    def _of_attempts(self, attempts: Iterable[Running]) -> Held:
        found = Held()
        for attempt in attempts if self.projects else ():
            project, kind = attempt.asked.project if attempt.asked else "", attempt.leases[0][0].partition("/")[2]
            self._add(found, project, kind, sum(len(numbers) for _, numbers in attempt.leases))
        return found

    def _keep(self, job: Job, key: tuple[str, str], devices: int) -> None:
        self._kept[key] += devices
        self._kept_for.setdefault(job.id, Held())[key] += devices

    def _add(self, to: Held, project: str, kind: str, devices: int) -> None:
        for pattern, _ in self._of(project, kind):
            to[project, pattern] += devices


@dataclass(frozen=True, slots=True)
class Holding:
    """What a project holds of its quota of a kind. `kind` "" and None: it has no quota. `borrow`: it may have more."""

    project: str
    kind: str
    quota: int | None
    held: int | None
    borrowed: int
    borrow: bool


def holdings(projects: Mapping[str, Project], running: Iterable[Running]) -> list[Holding]:
    """By project and kind of its quota."""
    quota, found = Quota(projects, running), []
    for name, project in sorted(projects.items()):
        if not project.quota:
            found.append(Holding(name, "", None, None, 0, project.borrow))
        for kind, most in project.quota.items():
            held = quota.holds(name, kind)
            found.append(Holding(name, kind, most, held, max(0, held - most), project.borrow))
    return found
