"""Projects with quotas in some worlds, and how many devices their jobs hold, counted apart from the code under test."""

from collections.abc import Mapping
from random import Random

from cluster.catalogue import matches_pattern
from orchestrator.core.model import Job, Project

CHANCE = 0.35
"""Share of worlds with projects."""
PATTERNS = ("tpu", "nvidia", "cpu", "nvidia:A100-80GB")
Holders = Mapping[tuple[str, int], str]
"""Job by (devices, number) of each device that is allocated."""


def draw_projects(seed: int) -> dict[str, Project]:
    """Projects of a world. They have random numbers of their own, so that they change nothing else in it."""
    rng = Random(f"projects of {seed}")
    if rng.random() >= CHANCE:
        return {}
    quotas = [{rng.choice(PATTERNS): rng.choice((1, 2, 4))} for _ in range(rng.choice((1, 2)))]
    return {f"project-{n}": Project(quota, borrow=rng.random() < 0.4) for n, quota in enumerate(quotas)}


def choose_project(projects: Mapping[str, Project], job: Job) -> str:
    """A project for a job, or "". Without borrowing, it must be one whose quota is enough for the job."""
    rng = Random(f"project of {job.id} {job.submitted_s}")
    needed = max(want.min_count * want.nodes for want in job.candidates)
    is_whole = any(want.exclusive for want in job.candidates)
    suitable = [
        name
        for name, project in projects.items()
        if project.borrow or (not is_whole and needed <= min(project.quota.values()))
    ]
    return rng.choice([*suitable, ""])


def beyond_quota(name: str, project: Project, project_by_job: Mapping[str, str], holders: Holders) -> str:
    """A sentence if the project's jobs hold more than a quota of it, else "". `borrow` is not considered."""
    held_ids = [devices_id for (devices_id, _), job in holders.items() if project_by_job.get(job) == name]
    kinds = [devices_id.partition("/")[2] for devices_id in held_ids]
    for pattern, most in project.quota.items():
        if (held := sum(matches_pattern(pattern, kind) for kind in kinds)) > most:
            return f"{name} holds {held} {pattern}, its quota is {most}"
    return ""
