"""Find the storage of a pool that has a checkpoint: the pool's nodes may share one storage or each have their own."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from cluster.errors import FleetError, NotFound, PolyfleetError, SpecError, nearest
from cluster.input.checkpoint_location import CheckpointLocation
from orchestrator.core.timing import NODE_SILENT_S

if TYPE_CHECKING:
    from orchestrator.runtime.agents.agents import Agents

ResolveReply = dict[str, Any] | PolyfleetError
"""Result of `resolve_checkpoint`: {"path", "passed_over": [{"path", "reason"}]}, path "" if nothing is there; or the
error that it raised.
"""


@dataclass(frozen=True, slots=True)
class CheckpointMatch:
    """A checkpoint, a node whose storage has it, and the newer ones of its folder that any node passed over."""

    node: str
    location: CheckpointLocation
    passed_over: tuple[dict[str, str], ...] = ()


def choose_newest(pool: str, outcomes: Mapping[str, ResolveReply]) -> CheckpointMatch | None:
    """The newest checkpoint that any node has, the first node's if equal. None if no node has one.
    If no node has one and some raised an error, raises the first error, since the checkpoint may be on that node.
    """
    replies = {node: outcome for node, outcome in outcomes.items() if isinstance(outcome, dict)}
    names = {node: PurePosixPath(outcome["path"]).name for node, outcome in replies.items() if outcome["path"]}
    if not names:
        for outcome in outcomes.values():
            if isinstance(outcome, PolyfleetError):
                raise outcome
        return None
    node = max(names, key=lambda one: names[one])  # max returns the first of equal ones
    passed_over = {row["path"]: row for outcome in replies.values() for row in outcome["passed_over"]}
    newer = (row for path, row in passed_over.items() if PurePosixPath(path).name > names[node])
    return CheckpointMatch(node, CheckpointLocation(pool, replies[node]["path"]), tuple(newer))


class PoolStorages:
    """Storages of pools, reached through their nodes. All methods may raise FleetError, or SpecError for an unknown
    pool.

    `job_id` returns the id of the newest job with a name, or "": checkpoints are stored by job id, users type names.
    """

    def __init__(self, agents: "Agents", job_id: Callable[[str], str] = lambda name: ""):
        self._agents, self._job_id = agents, job_id

    def replace_job_name(self, path: str) -> str:
        """`path` with the job's name at its beginning replaced by its id; "" if it does not begin with a job's name."""
        name, slash, rest = path.partition("/")
        job = self._job_id(name) if name else ""
        return f"{job}{slash}{rest}" if job not in ("", name) else ""

    def resolve_folder(self, location: CheckpointLocation) -> CheckpointLocation:
        """The folder of checkpoints at `location`; if no checkpoint is there, the folder of the job with that name."""
        path = self.replace_job_name(location.path)
        if not path or any(
            self._agents.call(node, "checkpoints", location.path) for node in self.nodes_of(location.pool)
        ):
            return location
        return CheckpointLocation(location.pool, path)

    def find(self, reference: CheckpointLocation, field: str = "checkpoint") -> CheckpointMatch:
        """Find a checkpoint on the pool's nodes. Raises NotFound that names the nearest existing one."""
        replies: dict[str, ResolveReply] = {}
        for node in self.nodes_of(reference.pool, field):
            try:
                reply = self._agents.call(node, "resolve_checkpoint", reference.path, reference.pool)
            except PolyfleetError as e:
                replies[node] = e
                continue
            replies[node] = reply
            if reply["path"] == reference.path:
                return CheckpointMatch(node, reference, tuple(reply["passed_over"]))
        if match := choose_newest(reference.pool, replies):
            return match
        if path := self.replace_job_name(reference.path):
            return self.find(CheckpointLocation(reference.pool, path), field)
        existing = [row["path"] for node in replies for row in self._agents.call(node, "checkpoints", "")]
        raise NotFound(f"no checkpoint at {reference}", nearest(reference.path, existing))

    def nodes_of(self, pool: str, field: str = "pool") -> list[str]:
        """One node for each storage of the pool. Nodes without a storage id count as sharing one. Nodes that
        have been silent come last.
        """
        first, now_s = self.node_of(pool, field), time.monotonic()
        serving = sorted(self._agents.of_pool(pool), key=lambda one: one[1].silent_s(now_s) > NODE_SILENT_S)
        by_storage: dict[str, str] = {}
        for name, node in serving:
            by_storage.setdefault(node.facts.storage_id if node.facts else "", name)
        return [*by_storage.values()] or [first]

    def node_of(self, pool: str, field: str = "pool") -> str:
        """A node that serves the pool's storage. If there are several storages, new data is written to this one."""
        serving = self._agents.of_pool(pool)
        if serving:
            return serving[0][0]
        pools = sorted({a.facts.pool for _, a in self._agents.items() if a.facts})
        if pool in pools:
            raise FleetError(
                f"no node of pool {pool!r} is up to reach its storage", "`polyfleet up` restarts lost nodes"
            )
        raise SpecError(field, f"no pool {pool!r}", nearest(pool, pools))
