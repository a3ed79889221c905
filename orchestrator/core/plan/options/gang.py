"""Attempts on several nodes: all nodes are in one island, and either all of them start or none."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any

from orchestrator.core.model import Candidate, Data, Devices, Job
from orchestrator.core.placement_slots import Island
from orchestrator.core.plan.options.fit import minimum_count, spans_slice, takes_all_devices


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
    tpu_slice = have.tpu_slice.name if have.tpu_slice and spans_slice(want, have) else ""
    per_node = have.total if want.exclusive else 0
    return Island(have.pool, have.kind, have.backend, have.environment, per_node, tpu_slice)


def islands(want: Candidate, devices: Iterable[Devices]) -> dict[Island, list[Devices]]:
    """Group nodes by island. The order of both does not depend on the order of `devices`.

    For exclusive candidates an island contains nodes with equal numbers of devices, because an attempt has the same
    number on each of its nodes. For candidates on several hosts of a TPU slice, each slice is an island of its own.
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
    data. A job on one node takes a host of an idle TPU slice last, and hosts of a slice are in the order of the slice.
    The number of devices per node is the largest of `want.counts` that `want.nodes` nodes have free, or with `fewest`
    the smallest. It is the same on all nodes, since the ranks of unequal nodes would wait for the slowest.
    """
    if len(fits) < want.nodes:
        return None
    frees = sorted((len(have.free) for have in fits), reverse=True)
    count = minimum_count(want, fits[0])
    if not (fewest or takes_all_devices(want, fits[0])):
        possible = range(min(want.count, frees[want.nodes - 1]), count, -1)
        count = next(filter(want.divides, possible), count)
    able = [have for have in fits if len(have.free) >= count]
    idle = _idle_slices(able) if want.nodes == 1 else frozenset[str]()
    chosen = nsmallest(want.nodes, able, key=_tightness(job, idle))
    if want.nodes > 1 and chosen[0].tpu_slice:
        chosen.sort(key=_position)
    return PlacementOption(index, count, tuple(chosen))


def _tightness(job: Job, idle_slices: frozenset[str]) -> Callable[[Devices], tuple[Any, ...]]:
    """Return a key whose lowest value has the best node. Most jobs need only two parts of it, for every node."""
    if not (job.avoid or job.checkpoint_in or job.data or idle_slices):
        return lambda d: (len(d.free), d.id)
    return lambda d: (
        d.node in job.avoid,
        is_far(job, d),
        _is_in(idle_slices, d),
        len(d.free),
        count_missing(job.data, d),
        d.id,
    )


def _position(have: Devices) -> tuple[int, str]:
    return have.tpu_slice.worker if have.tpu_slice else 0, have.id


def _is_in(slices: frozenset[str], have: Devices) -> bool:
    return have.tpu_slice is not None and have.tpu_slice.name in slices


def _idle_slices(nodes: Iterable[Devices]) -> frozenset[str]:
    """Return the TPU slices of which every host is among these nodes, with all devices free."""
    idle = [have.tpu_slice for have in nodes if have.tpu_slice and len(have.free) == have.total]
    hosts = Counter((tpu_slice.name, tpu_slice.hosts) for tpu_slice in idle)
    return frozenset(name for (name, total), count in hosts.items() if count >= total)


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
    if island.tpu_slice:
        return (
            f"the job needs all {want.nodes} hosts of one TPU slice; {len(fits)} of slice {island.tpu_slice} in pool "
            f"{island.pool} ({island.kind}) can run it"
        )
    have = f"pool {island.pool} has {len(fits)} ({island.kind})"
    each = "as many devices as the others" if want.exclusive else f"{want.min_count} devices"
    return f"the job needs {want.nodes} nodes of one pool and kind, each with {each}; {have}"
