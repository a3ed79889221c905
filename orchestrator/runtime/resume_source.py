"""The checkpoint that an attempt goes on from: found among all that its nodes left, and copied to where they run.

Nodes of one pool may see one storage (a mount that they share) or each its own disk: their `storage_id` tells.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cluster import checkpoint_location
from cluster.checkpoint_location import CheckpointLocation
from cluster.errors import FleetError, NotFound, SpecError, UserError
from orchestrator.checkpoints import CheckpointService
from orchestrator.core.commands import Launch
from orchestrator.core.nodes import Node
from orchestrator.core.timing import NODE_SILENT_S
from orchestrator.runtime.agents import Agents
from workers.errors import CheckpointError

Does = Callable[[str], None]
Data = dict[str, Any]


RESUME_FROM = "checkpoint.resume_from"


class UnusableError(SpecError):
    """What the job was told to start from is not there: its user alone can help."""

    def __init__(self, message: str, remedy: str):
        super().__init__(RESUME_FROM, message, remedy)
        self.args = (message, remedy)


@dataclass(frozen=True, slots=True)
class Brought:
    """`found`: pool, path and step of what the attempt goes on from, as its nodes see it; None: from its beginning.
    `missed` says which newer checkpoint could not be reached.
    """

    found: Data | None
    missed: str = ""


class Bringer:
    def __init__(self, agents: Agents, checkpoints: CheckpointService):
        self.agents, self.checkpoints = agents, checkpoints

    def bring(self, asked: Launch, does: Does) -> Brought:
        """What is in its way is trouble of the fleet, FleetError: tried again; not so what is absent (UnusableError)
        or damaged (CheckpointError).
        """
        try:
            return self._bring(asked, does)
        except (UnusableError, CheckpointError):
            raise
        except UserError as e:
            raise FleetError(e.message, e.remedy) from e

    def _bring(self, asked: Launch, does: Does) -> Brought:
        """The job's newest checkpoint, else the one it was told to start from, in the storage of each of its nodes.

        Its bytes are proved while they move, or by the ranks that load them. One that is damaged is marked where it
        lies, and the one before it moves.
        """
        tried = set[CheckpointLocation]()
        while True:
            does("looks for the newest checkpoint")
            source = self._newest(asked)
            missed = self._missed(asked, source)
            if source is None and asked.resume_from:
                source = self._asked_for(asked.resume_from, asked.pool)
            if source is None:
                return Brought(None, missed)
            targets = self._targets(asked, source)
            same = source["pool"] == asked.pool or not targets
            final = source["path"] if same else f"{asked.job}/{Path(source['path']).name}"
            if self._moved(asked, (source, final), targets, tried, does):
                found = {"pool": asked.pool, "path": final, "step": source["step"]}
                return Brought(found, missed)

    def _moved(
        self, asked: Launch, what: tuple[Data, str], targets: list[str], tried: set[CheckpointLocation], does: Does
    ) -> bool:
        """Copied to each of `targets`. False where it was found damaged: another one is looked for."""
        source, final = what
        there, reader = CheckpointLocation(source["pool"], source["path"]), source["node"]
        for node in targets:
            copies = f"copies step {source['step']} from {_where(source, asked.pool)}"
            does(copies)
            progress = partial(_copying, does, copies)
            try:
                self.checkpoints.move((reader, there), node, final, progress)
            except CheckpointError as e:
                if there in tried:
                    raise
                does(f"reads all of {there}, which could not be copied")
                if self.checkpoints.is_sound(reader, there):
                    raise FleetError(f"{there} is sound, and did not reach {node}: {e.message}") from e
                tried.add(there)
                return False
        return True

    def _targets(self, asked: Launch, source: Data) -> list[str]:
        """One node for each storage of the attempt's nodes, but for the one that it lies in."""
        by_storage = {self._storage_of(node, asked.pool): node for node in reversed(asked.nodes)}
        by_storage.pop(source["storage"], None)
        return list(by_storage.values())

    def _newest(self, asked: Launch) -> Data | None:
        """Of all pools the job has been to: an attempt cut off from us may have saved after it last reported. Copies of
        it may lie in others.
        """
        found = []
        for pool in dict.fromkeys((*asked.visited, *(replica["pool"] for replica in asked.replicas))):
            for storage, node in self._storages(pool).items():
                if newest := self.checkpoints.newest(node, CheckpointLocation(pool, asked.job)):
                    found.append(newest | {"node": node, "storage": storage})
        return max(found, key=lambda f: int(f["step"]), default=None)

    def _missed(self, asked: Launch, newest: Data | None) -> str:
        """Which newer checkpoint of the job is known and lies where no node can look, "" when there is none.

        Raises FleetError where the job waits for it: where no node of its pool is up and there is no copy elsewhere to
        go on from, and where its user said so. Progress is not thrown away in silence.
        """
        known = asked.known
        if known is None or (newest is not None and newest["step"] >= known["step"]):
            return ""
        pool = known["pool"]
        storages = self._storages(pool)
        if not storages:
            said = f"the newest checkpoint (step {known['step']}) lies in pool {pool}, of which no node is up"
            if newest is not None and asked.replicas and not asked.patient:
                return said
            raise FleetError(said, "`polyfleet up` restarts lost nodes; the job goes on from it then")
        away = [name for name in self._untold(pool) if self._storage_of(name, pool) not in storages]
        if not away:
            return ""
        said = f"the newest checkpoint (step {known['step']}) lies on {' or '.join(away)}, which cannot be reached"
        if asked.patient:
            raise FleetError(said, "the job waits for it (recovery.on_disconnect is wait)")
        return said

    def _asked_for(self, text: str, pool: str) -> Data:
        """Raises UnusableError once nobody is left who may have it."""
        reference = checkpoint_location.parse_pool_path(text, RESUME_FROM, pool)
        if not self.agents.of_pool(reference.pool):
            why = f"{RESUME_FROM}: no node of pool {reference.pool!r} is up to read {reference} from"
            raise FleetError(why, "`polyfleet status` lists the nodes; the job starts once one is up")
        for storage, node in self._storages(reference.pool).items():
            if found := self._seen_by(node, reference):
                return found | {"node": node, "storage": storage}
        try:
            self.checkpoints.show(str(reference))
        except NotFound as e:
            if untold := self._untold(reference.pool):
                why = f"{RESUME_FROM}: {e.message}, and {', '.join(untold)} may have it and cannot be asked now"
                raise FleetError(why, "`polyfleet status` lists the nodes") from e
            raise UnusableError(e.message, e.remedy) from None
        raise FleetError(f"{RESUME_FROM}: {reference} has just come", "the job is started again")

    def _seen_by(self, node: str, reference: CheckpointLocation) -> Data | None:
        try:
            return self.checkpoints.newest(node, reference)
        except NotFound:
            return None

    def _storages(self, pool: str) -> Mapping[str, str]:
        """A node to read with, for each storage of `pool` that is reached: its own nodes, else one of the same machine
        that sees it.
        """
        own = [name for name, node in self.agents.of_pool(pool) if _answers(node)]
        if own:
            return {self._storage_of(name, pool): name for name in reversed(own)}
        ready = [(name, node) for name, node in self.agents.ready() if _answers(node)]
        others = [name for name, node in ready if node.facts and pool in node.facts.neighbours]
        return {f"pool {pool}": others[0]} if others else {}

    def _storage_of(self, node: str, pool: str) -> str:
        """Where a node's storage has no identity, it counts as shared by its pool."""
        known = self.agents.get(node)
        return known.facts.storage_id if known and known.facts and known.facts.storage_id else f"pool {pool}"

    def _untold(self, pool: str) -> list[str]:
        """Nodes that are or may be of `pool` and cannot be asked: not all of them need see the same storage."""
        nodes = self.agents.items()
        away = [(name, node) for name, node in nodes if not node.ready or not _answers(node)]
        return [name for name, node in away if not node.facts or node.facts.pool == pool]


def _answers(node: Node) -> bool:
    """Ray may list one that is cut off for another minute."""
    return node.silent_s(time.monotonic()) <= NODE_SILENT_S


def _where(source: Data, pool: str) -> str:
    return str(source["node"] if source["pool"] == pool else source["pool"])


def _copying(does: Does, copies: str, done: int, total: int) -> None:
    does(f"{copies} ({done >> 20} of {total >> 20} MiB)")
