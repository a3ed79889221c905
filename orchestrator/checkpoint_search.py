"""Which storage of a pool has the checkpoint that a user named: its nodes may share one, or each have their own."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from cluster.checkpoint_location import CheckpointLocation
from cluster.errors import FleetError, NotFound, PolyfleetError, SpecError, nearest
from orchestrator.core.timing import NODE_SILENT_S

if TYPE_CHECKING:
    from orchestrator.runtime.agents import Agents

Answer = dict[str, Any] | PolyfleetError
"""Of `resolve_checkpoint`: {"path", "passed_over": [{"path", "reason"}]}, "" for nothing there; or what was raised."""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint, a node whose storage has it, and the newer ones of its folder that are passed over, wherever."""

    node: str
    place: CheckpointLocation
    passed_over: tuple[dict[str, str], ...] = ()


def newest(pool: str, answers: Mapping[str, Answer]) -> Found | None:
    """The newest that any node has, of equal ones the first; None where all say that nothing is there. Raises what a
    node raised where no other has one: it may lie there.
    """
    told = {node: answer for node, answer in answers.items() if isinstance(answer, dict)}
    having = {node: PurePosixPath(answer["path"]).name for node, answer in told.items() if answer["path"]}
    if not having:
        for answer in answers.values():
            if isinstance(answer, PolyfleetError):
                raise answer
        return None
    node = max(having, key=lambda one: having[one])  # the first of equal ones
    passed_over = {row["path"]: row for answer in told.values() for row in answer["passed_over"]}
    newer = (row for path, row in passed_over.items() if PurePosixPath(path).name > having[node])
    return Found(node, CheckpointLocation(pool, told[node]["path"]), tuple(newer))


class Storages:
    """Of pools, by the nodes that serve them. All may raise FleetError, or SpecError for a pool that nobody knows.

    `job_id` is the id of the newest job of a name, or "": checkpoints lie below ids, and users type names.
    """

    def __init__(self, agents: "Agents", job_id: Callable[[str], str] = lambda name: ""):
        self._agents, self._job_id = agents, job_id

    def of_job(self, path: str) -> str:
        """`path` with the id of a job in place of its name; "" where it does not begin with a job's name."""
        name, slash, rest = path.partition("/")
        job = self._job_id(name) if name else ""
        return f"{job}{slash}{rest}" if job not in ("", name) else ""

    def folder(self, place: CheckpointLocation) -> CheckpointLocation:
        """The folder of checkpoints that `place` means: of a job that is so called, where no checkpoint lies there."""
        path = self.of_job(place.path)
        if not path or any(self._agents.call(node, "checkpoints", place.path) for node in self.nodes_of(place.pool)):
            return place
        return CheckpointLocation(place.pool, path)

    def find(self, reference: CheckpointLocation, field: str = "checkpoint") -> Found:
        """Raises NotFound naming the nearest one that is there."""
        answers: dict[str, Answer] = {}
        for node in self.nodes_of(reference.pool, field):
            try:
                answer = self._agents.call(node, "resolve_checkpoint", reference.path, reference.pool)
            except PolyfleetError as e:
                answers[node] = e
                continue
            answers[node] = answer
            if answer["path"] == reference.path:
                return Found(node, reference, tuple(answer["passed_over"]))
        if found := newest(reference.pool, answers):
            return found
        if path := self.of_job(reference.path):
            return self.find(CheckpointLocation(reference.pool, path), field)
        here = [row["path"] for node in answers for row in self._agents.call(node, "checkpoints", "")]
        raise NotFound(f"no checkpoint at {reference}", nearest(reference.path, here))

    def nodes_of(self, pool: str, field: str = "pool") -> list[str]:
        """One for each storage that its nodes see; where they cannot tell, they count as sharing one. Those that have
        been silent come last.
        """
        first, now_s = self.node_of(pool, field), time.monotonic()
        serving = sorted(self._agents.of_pool(pool), key=lambda one: one[1].silent_s(now_s) > NODE_SILENT_S)
        by_storage: dict[str, str] = {}
        for name, node in serving:
            by_storage.setdefault(node.facts.storage_id if node.facts else "", name)
        return [*by_storage.values()] or [first]

    def node_of(self, pool: str, field: str = "pool") -> str:
        """One that serves the pool's storage: where they have several, that of what is written there."""
        serving = self._agents.of_pool(pool)
        if serving:
            return serving[0][0]
        known = sorted({a.facts.pool for _, a in self._agents.items() if a.facts})
        if pool in known:
            raise FleetError(
                f"no node of pool {pool!r} is up to reach its storage", "`polyfleet up` restarts lost nodes"
            )
        raise SpecError(field, f"no pool {pool!r}", nearest(pool, known))
