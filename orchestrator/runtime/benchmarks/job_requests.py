"""Plan the jobs of a run: one per kind, or one per node, each with a node to itself. Pure.

The planner decides which node a job gets, except if the run requests all devices.
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
"""Maximum restarts of a session: each case that ends the session's process costs one."""
MAX_POOLS = 32
"""Maximum number of candidates of one job."""


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A job that holds one node of `kind` in any of `pools`, or `node`.

    Its target is `name`. With `each`, every device of the node is a target, numbered if there are several.
    """

    name: str
    kind: str
    pools: tuple[str, ...]
    node: str = ""
    each: bool = False

    def targets(self, numbers: Sequence[int]) -> list[tuple[int, str]]:
        """Name the targets for the devices of the job: (index of the device in the job, name of the target)."""
        if not self.each or len(numbers) == 1:
            return [(0, self.name)]
        return [(position, f"{self.name}.{number}") for position, number in enumerate(numbers)]

    def spec(self, run: str, request: BenchmarkRequest) -> Data:
        spec: Data = {
            "name": f"{run}-{self.pools[0]}",
            "task": "benchmark",
            "arguments": {"session": run} | ({"sample_input": request.sample_input} if request.sample_input else {}),
            "resources": self._resources(),
            "seed": request.seed,
            "priority": request.priority,
            "recovery": {"max_restarts": RESTARTS, "max_interruptions": 3, "lease": LEASE},
        }
        spec |= {"entry": request.entry} if request.entry else {}
        return spec | ({"batch_size": request.batch_size} if request.batch_size else {})

    def _resources(self) -> Data:
        if len(self.pools) == 1:
            node = {"node": self.node} if self.node else {}
            return {"accelerators": self.kind, "pool": self.pools[0], **node, "exclusive": True}
        pools = [{"accelerators": self.kind, "pool": pool} for pool in self.pools[:MAX_POOLS]]
        return {"any_of": pools, "exclusive": True}


def plan_jobs(request: BenchmarkRequest, devices: Iterable[Devices]) -> list[JobRequest]:
    """Plan the jobs, in the order of the requested kinds and pools.

    Raises SpecError naming the available ones if a kind or pool has no device, FleetError if no device is ready.
    """
    ready = sorted((d for d in devices if d.schedulable), key=lambda d: d.id)
    if not ready:
        raise FleetError("no device is ready", "run `polyfleet status` to see what the fleet waits for")
    selected = _of_pools(request.pools, _of_kinds(request.kinds, ready))
    if request.all_devices:
        is_unique = len({d.kind for d in selected}) == len(selected) and all(d.total == 1 for d in selected)
        return [
            JobRequest(d.kind if is_unique else f"{d.kind}@{d.node}", d.kind, (d.pool,), d.node, True) for d in selected
        ]
    pools: dict[tuple[str, str], dict[str, None]] = {}
    for group in selected:
        pools.setdefault((group.pool if request.pools else "", group.kind), {})[group.pool] = None
    is_unique = len({kind for _, kind in pools}) == len(pools)
    return [
        JobRequest(kind if is_unique else f"{kind}@{pool}", kind, tuple(pool_names))
        for (pool, kind), pool_names in pools.items()
    ]


def _of_kinds(kinds: tuple[str, ...], ready: list[Devices]) -> list[Devices]:
    if not kinds:
        return ready
    selected: list[Devices] = []
    for kind in kinds:
        matching = [d for d in ready if d.kind == kind or d.kind.startswith((f"{kind}:", f"{kind}-"))]
        if not matching:
            available = sorted({d.kind for d in ready})
            raise SpecError("kinds", f"no device of kind {kind!r} is ready", f"choose from {', '.join(available)}")
        selected += [d for d in matching if d.kind == kind] or matching
    return list(dict.fromkeys(selected))


def _of_pools(pools: tuple[str, ...], ready: list[Devices]) -> list[Devices]:
    if not pools:
        return ready
    available = sorted({d.pool for d in ready})
    for pool in pools:
        if pool not in available:
            raise SpecError("pools", f"no device of pool {pool!r} is ready", nearest(pool, available))
    return [d for pool in dict.fromkeys(pools) for d in ready if d.pool == pool]
