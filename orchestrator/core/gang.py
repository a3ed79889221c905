"""Attempts over several nodes: all of them in one island, all or none."""

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.core.fit import least
from orchestrator.core.model import Candidate, Data, Devices, Job
from orchestrator.core.placement_slots import Island


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a job now: `count` devices on each of `nodes`, which are ready and have them free."""

    candidate: int
    count: int
    nodes: tuple[Devices, ...]

    @property
    def leases(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The lowest free numbers of each node, in the order of the ranks."""
        return tuple((have.id, tuple(sorted(have.free))[: self.count]) for have in self.nodes)


def island_of(want: Candidate, have: Devices) -> Island:
    return Island(have.pool, have.kind, have.backend, have.environment, have.total if want.exclusive else 0)


def islands(want: Candidate, devices: Iterable[Devices]) -> dict[Island, list[Devices]]:
    """Nodes by island, both in a fixed order whatever order they came in.

    Whole nodes share an island where they have equally many devices: an attempt has as many on each of its nodes.
    """
    grouped: dict[Island, list[Devices]] = {}
    for have in sorted(devices, key=lambda d: d.id):
        grouped.setdefault(island_of(want, have), []).append(have)
    return dict(sorted(grouped.items()))


def option(index: int, want: Candidate, fits: list[Devices], job: Job, fewest: bool = False) -> Option | None:
    """The tightest place in one island, or None. `fits` are its nodes that no rule refuses; those that `job` avoids
    come last, those that have its checkpoint first, and of equal ones those that have most of its data.

    Of `want.counts`, as many devices per node as `want.nodes` nodes can give, or the `fewest`. Every node gives the
    same number, since the ranks of unequal nodes wait for the slowest.
    """
    if len(fits) < want.nodes:
        return None
    frees = sorted((len(have.free) for have in fits), reverse=True)
    count = least(want, fits[0])
    if not (fewest or want.exclusive):
        possible = range(min(want.count, frees[want.nodes - 1]), count, -1)
        count = next(filter(want.divides, possible), count)
    able = [have for have in fits if len(have.free) >= count]
    tightest = sorted(able, key=lambda d: (d.node in job.avoid, far(job, d), len(d.free), absent(job.data, d), d.id))
    return Option(index, count, tuple(tightest[: want.nodes]))


def far(job: Job, have: Devices) -> bool:
    """Whether its checkpoint would have to be brought there."""
    return bool(job.checkpoint_in) and have.storage not in job.checkpoint_in


def absent(data: tuple[Data, ...], have: Devices) -> int:
    """How many of them the node would have to fetch."""
    return sum(one.key not in have.data for one in data)


def too_few_nodes(want: Candidate, found: dict[Island, list[Devices]]) -> str:
    """Why a gang fits no island although single nodes agree; "" for a single node or where no node agrees."""
    if want.nodes == 1 or not found:
        return ""
    island, fits = max(found.items(), key=lambda item: len(item[1]))
    have = f"pool {island.pool} has {len(fits)} ({island.kind})"
    each = "as many devices as the others" if want.exclusive else f"{want.min_count} devices"
    return f"the job needs {want.nodes} nodes of one pool and kind, each with {each}; {have}"
