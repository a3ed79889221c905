"""Attempts on several nodes: all nodes are in one island, and either all of them start or none."""

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.core.model import Candidate, Data, Devices, Job
from orchestrator.core.placement_slots import Island
from orchestrator.core.plan.options.fit import minimum_count


@dataclass(frozen=True, slots=True)
class PlacementOption:
    """Possible placement of a job now: `count` free devices on each of `nodes`, which are ready."""

    candidate: int
    count: int
    nodes: tuple[Devices, ...]

    @property
    def allocation(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Device numbers to allocate: the lowest free ones of each node, in the order of the ranks."""
        return tuple((have.id, tuple(sorted(have.free))[: self.count]) for have in self.nodes)


def island_of(want: Candidate, have: Devices) -> Island:
    return Island(have.pool, have.kind, have.backend, have.environment, have.total if want.exclusive else 0)


def islands(want: Candidate, devices: Iterable[Devices]) -> dict[Island, list[Devices]]:
    """Group nodes by island. The order of both does not depend on the order of `devices`.

    For exclusive candidates an island contains nodes with equal numbers of devices, because an attempt has the same
    number on each of its nodes.
    """
    grouped: dict[Island, list[Devices]] = {}
    for have in sorted(devices, key=lambda d: d.id):
        grouped.setdefault(island_of(want, have), []).append(have)
    return dict(sorted(grouped.items()))


def best_option(
    index: int, want: Candidate, fits: list[Devices], job: Job, fewest: bool = False
) -> PlacementOption | None:
    """Return the tightest fit in one island, or None. `fits` are its nodes that no rule refuses.

    Nodes that `job` avoids come last, nodes that have its checkpoint first, and among equal ones those with most of its
    data. The number of devices per node is the largest of `want.counts` that `want.nodes` nodes have free, or with
    `fewest` the smallest. It is the same on all nodes, since the ranks of unequal nodes would wait for the slowest.
    """
    if len(fits) < want.nodes:
        return None
    frees = sorted((len(have.free) for have in fits), reverse=True)
    count = minimum_count(want, fits[0])
    if not (fewest or want.exclusive):
        possible = range(min(want.count, frees[want.nodes - 1]), count, -1)
        count = next(filter(want.divides, possible), count)
    able = [have for have in fits if len(have.free) >= count]
    tightest = sorted(
        able, key=lambda d: (d.node in job.avoid, is_far(job, d), len(d.free), count_missing(job.data, d), d.id)
    )
    return PlacementOption(index, count, tuple(tightest[: want.nodes]))


def is_far(job: Job, have: Devices) -> bool:
    """Return True if the job's checkpoint would have to be copied to this node."""
    return bool(job.checkpoint_in) and have.storage not in job.checkpoint_in


def count_missing(data: tuple[Data, ...], have: Devices) -> int:
    """Count the data items that the node would have to fetch."""
    return sum(item.key not in have.data for item in data)


def too_few_nodes_reason(want: Candidate, by_island: dict[Island, list[Devices]]) -> str:
    """Say why no island has enough nodes for a gang; "" for a single node or if no node can serve it."""
    if want.nodes == 1 or not by_island:
        return ""
    island, fits = max(by_island.items(), key=lambda item: len(item[1]))
    have = f"pool {island.pool} has {len(fits)} ({island.kind})"
    each = "as many devices as the others" if want.exclusive else f"{want.min_count} devices"
    return f"the job needs {want.nodes} nodes of one pool and kind, each with {each}; {have}"
