"""Which jobs a run needs: one for each kind, or one for each node, each with a node to itself. Pure.

Which node a job gets is the planner's decision, except where every node was asked for.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import FleetError, SpecError, nearest
from orchestrator.benchmark.suite import BenchmarkRequest
from orchestrator.core.model import Devices

Data = dict[str, Any]
LEASE = "120s"
RESTARTS = 50
"""Of a session: each case that ends its process costs one."""
MOST_POOLS = 32
"""So many candidates one job has at most."""


@dataclass(frozen=True, slots=True)
class JobRequest:
    """One job, which holds one node of `kind` in any of `pools`, or `node`. It is measured in the column `name`; with
    `each` in one column per device, numbered where it has several."""

    name: str
    kind: str
    pools: tuple[str, ...]
    node: str = ""
    each: bool = False

    def columns(self, numbers: Sequence[int]) -> list[tuple[int, str]]:
        """Once its job holds these devices of its node: (which of those that the job sees, the column's name)."""
        if not self.each or len(numbers) == 1:
            return [(0, self.name)]
        return [(place, f"{self.name}.{number}") for place, number in enumerate(numbers)]

    def spec(self, run: str, asked: BenchmarkRequest) -> Data:
        spec: Data = {
            "name": f"{run}-{self.pools[0]}",
            "task": "benchmark",
            "arguments": {"session": run} | ({"sample_input": asked.sample_input} if asked.sample_input else {}),
            "resources": self._resources(),
            "seed": asked.seed,
            "priority": asked.priority,
            "recovery": {"max_restarts": RESTARTS, "max_interruptions": 3, "lease": LEASE},
        }
        spec |= {"entry": asked.entry} if asked.entry else {}
        return spec | ({"batch_size": asked.batch_size} if asked.batch_size else {})

    def _resources(self) -> Data:
        if len(self.pools) == 1:
            node = {"node": self.node} if self.node else {}
            return {"accelerators": self.kind, "pool": self.pools[0], **node, "exclusive": True}
        pools = [{"accelerators": self.kind, "pool": pool} for pool in self.pools[:MOST_POOLS]]
        return {"any_of": pools, "exclusive": True}


def plan_jobs(asked: BenchmarkRequest, devices: Iterable[Devices]) -> list[JobRequest]:
    """In the order of the kinds and pools asked for. Raises SpecError naming what is here where nothing of what was
    asked for is, FleetError where nothing is ready at all."""
    here = sorted((d for d in devices if d.schedulable), key=lambda d: d.id)
    if not here:
        raise FleetError("no device is ready", "`polyfleet status` shows what the fleet waits for")
    chosen = _of_pools(asked.pools, _of_kinds(asked.kinds, here))
    if asked.all_devices:
        alone = len({d.kind for d in chosen}) == len(chosen) and all(d.total == 1 for d in chosen)
        return [JobRequest(d.kind if alone else f"{d.kind}@{d.node}", d.kind, (d.pool,), d.node, True) for d in chosen]
    pools: dict[tuple[str, str], dict[str, None]] = {}
    for have in chosen:
        pools.setdefault((have.pool if asked.pools else "", have.kind), {})[have.pool] = None
    alone = len({kind for _, kind in pools}) == len(pools)
    return [
        JobRequest(kind if alone else f"{kind}@{pool}", kind, tuple(found)) for (pool, kind), found in pools.items()
    ]


def _of_kinds(kinds: tuple[str, ...], here: list[Devices]) -> list[Devices]:
    if not kinds:
        return here
    chosen: list[Devices] = []
    for kind in kinds:
        of_it = [d for d in here if d.kind == kind or d.kind.startswith((f"{kind}:", f"{kind}-"))]
        if not of_it:
            known = sorted({d.kind for d in here})
            raise SpecError("kinds", f"no device of kind {kind!r} is here", f"here: {', '.join(known)}")
        chosen += [d for d in of_it if d.kind == kind] or of_it
    return list(dict.fromkeys(chosen))


def _of_pools(pools: tuple[str, ...], here: list[Devices]) -> list[Devices]:
    if not pools:
        return here
    known = sorted({d.pool for d in here})
    for pool in pools:
        if pool not in known:
            raise SpecError("pools", f"no device of pool {pool!r} is ready", nearest(pool, known))
    return [d for pool in dict.fromkeys(pools) for d in here if d.pool == pool]
