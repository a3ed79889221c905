"""Find the checkpoint that an attempt resumes from, and copy it to the storage of the attempt's nodes.

Nodes of a pool may share one storage (a mount) or have a disk each; their `storage_id` shows which.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cluster.errors import FleetError, NotFound, SpecError, UserError
from cluster.input import checkpoint_location
from cluster.input.checkpoint_location import CheckpointLocation
from orchestrator.core.controller.commands import Launch
from orchestrator.core.controller.nodes import Node
from orchestrator.core.timing import NODE_SILENT_S
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.checkpoints.checkpoints import CheckpointService
from workers.errors import CheckpointError

SetActivity = Callable[[str], None]
Data = dict[str, Any]


RESUME_FROM = "checkpoint.resume_from"


class ResumeSourceMissing(SpecError):
    """The checkpoint in the job's `checkpoint.resume_from` does not exist: only the user can correct this."""

    def __init__(self, message: str, remedy: str):
        super().__init__(RESUME_FROM, message, remedy)
        self.args = (message, remedy)


@dataclass(frozen=True, slots=True)
class ResumeSource:
    """Result of `bring`.

    `checkpoint`: pool, path and step of the checkpoint to resume from, as the attempt's nodes see it; None: start from
    the beginning. `missed`: sentence on a newer checkpoint that could not be reached, or "".
    """

    checkpoint: Data | None
    missed: str = ""


class ResumeSourceFinder:
    def __init__(self, agents: Agents, checkpoints: CheckpointService):
        self.agents, self.checkpoints = agents, checkpoints

    def ensure_on_nodes(self, launch: Launch, set_activity: SetActivity) -> ResumeSource:
        """Find and copy the checkpoint for a launch.

        Raises ResumeSourceMissing if it does not exist, CheckpointError if it is damaged, and FleetError, after which
        the launch is retried, for all else.
        """
        try:
            return self._ensure_on_nodes(launch, set_activity)
        except (ResumeSourceMissing, CheckpointError):
            raise
        except UserError as e:
            raise FleetError(e.message, e.remedy) from e

    def _ensure_on_nodes(self, launch: Launch, set_activity: SetActivity) -> ResumeSource:
        """Copy the job's newest checkpoint, or else its `resume_from`, to the storage of each of its nodes.

        The data is verified while it is copied, or by the ranks that load it. A damaged checkpoint is marked as such in
        its storage, and the one before it is used.
        """
        tried = set[CheckpointLocation]()
        while True:
            set_activity("looks for the newest checkpoint")
            source = self._newest(launch)
            missed = self._missed_reason(launch, source)
            if source is None and launch.resume_from:
                source = self._find_requested(launch.resume_from, launch.pool)
            if source is None:
                return ResumeSource(None, missed)
            targets = self._targets(launch, source)
            is_same_pool = source["pool"] == launch.pool or not targets
            final = source["path"] if is_same_pool else f"{launch.job}/{Path(source['path']).name}"
            if self._copy_to_nodes(launch, (source, final), targets, tried, set_activity):
                checkpoint = {"pool": launch.pool, "path": final, "step": source["step"]}
                return ResumeSource(checkpoint, missed)

    def _copy_to_nodes(
        self,
        launch: Launch,
        source_and_path: tuple[Data, str],
        targets: list[str],
        tried: set[CheckpointLocation],
        set_activity: SetActivity,
    ) -> bool:
        """Copy a checkpoint to each of `targets`, and to its reader if it is only in an object store.

        Return False if it is damaged: the caller then tries another one.
        """
        source, final = source_and_path
        location, reader = CheckpointLocation(source["pool"], source["path"]), source["node"]
        activity = f"copies step {source['step']} from {_where(source, launch.pool)}"
        set_activity(activity)
        progress = partial(_copying, set_activity, activity)
        for node in targets or [reader]:
            try:
                if targets:
                    self.checkpoints.move((reader, location), node, final, progress)
                else:
                    self.checkpoints.stage(reader, location, progress)
            except CheckpointError as e:
                if location in tried:
                    raise
                set_activity(f"reads all of {location}, which could not be copied")
                if self.checkpoints.is_sound(reader, location):
                    raise FleetError(f"{location} is intact, but could not be copied to {node}: {e.message}") from e
                tried.add(location)
                return False
        return True

    def _targets(self, launch: Launch, source: Data) -> list[str]:
        """One node for each storage of the attempt's nodes, except the one that has the checkpoint."""
        by_storage = {self._storage_of(node, launch.pool): node for node in reversed(launch.nodes)}
        by_storage.pop(source["storage"], None)
        return list(by_storage.values())

    def _newest(self, launch: Launch) -> Data | None:
        """The job's newest checkpoint in all pools that it has run in or that have copies.

        An attempt that was cut off from the server may have saved after its last metrics.
        """
        checkpoints = []
        for pool in dict.fromkeys((*launch.earlier_pools, *(replica["pool"] for replica in launch.replicas))):
            for storage, node in self._storages(pool).items():
                if newest := self.checkpoints.newest(node, CheckpointLocation(pool, launch.job)):
                    checkpoints.append(newest | {"node": node, "storage": storage})
        return max(checkpoints, key=lambda f: int(f["step"]), default=None)

    def _missed_reason(self, launch: Launch, newest: Data | None) -> str:
        """Return a sentence on a newer recorded checkpoint that no node can read now, or "".

        Raises FleetError if the job waits for that checkpoint, so that progress is not lost silently: when no node of
        its pool is up and there is no copy elsewhere, and when `recovery.on_disconnect` is `wait`.
        """
        last = launch.last_checkpoint
        if last is None or (newest is not None and newest["step"] >= last["step"]):
            return ""
        pool = last["pool"]
        storages = self._storages(pool)
        if not storages:
            message = f"the newest checkpoint (step {last['step']}) is in pool {pool}, which has no node that is up"
            if newest is not None and launch.replicas and not launch.waits_for_checkpoint:
                return message
            raise FleetError(message, "run `polyfleet up` to restart lost nodes; the job then resumes from it")
        unread = [name for name in self._unavailable_nodes(pool) if self._storage_of(name, pool) not in storages]
        if not unread:
            return ""
        message = f"the newest checkpoint (step {last['step']}) is on {' or '.join(unread)}, which cannot be reached"
        if launch.waits_for_checkpoint:
            raise FleetError(message, "the job waits for it (recovery.on_disconnect is wait)")
        return message

    def _find_requested(self, text: str, pool: str) -> Data:
        """Find the checkpoint in `resume_from`.

        Raises ResumeSourceMissing if it does not exist, FleetError if a node that may have it cannot be reached now.
        """
        reference = checkpoint_location.parse_pool_path(text, RESUME_FROM, pool)
        if not self.agents.of_pool(reference.pool):
            message = f"{RESUME_FROM}: no node of pool {reference.pool!r} is up to read {reference}"
            raise FleetError(message, "`polyfleet status` lists the nodes; the job starts once one is up")
        for storage, node in self._storages(reference.pool).items():
            if checkpoint := self._find_on(node, reference):
                return checkpoint | {"node": node, "storage": storage}
        try:
            self.checkpoints.show(str(reference))
        except NotFound as e:
            if unavailable := self._unavailable_nodes(reference.pool):
                message = (
                    f"{RESUME_FROM}: {e.message}, but {', '.join(unavailable)} may have it and cannot be reached now"
                )
                raise FleetError(message, "`polyfleet status` lists the nodes") from e
            raise ResumeSourceMissing(e.message, e.remedy) from None
        raise FleetError(f"{RESUME_FROM}: {reference} has just appeared", "nothing to do: the job is started again")

    def _find_on(self, node: str, reference: CheckpointLocation) -> Data | None:
        try:
            return self.checkpoints.newest(node, reference)
        except NotFound:
            return None

    def _storages(self, pool: str) -> Mapping[str, str]:
        """A node to read with, for each reachable storage of `pool`.

        It is one of the pool, or else one of the same machine that sees the pool's storage.
        """
        own = [name for name, node in self.agents.of_pool(pool) if _has_answered(node)]
        if own:
            return {self._storage_of(name, pool): name for name in reversed(own)}
        ready = [(name, node) for name, node in self.agents.ready() if _has_answered(node)]
        others = [name for name, node in ready if node.facts and pool in node.facts.neighbours]
        return {f"pool {pool}": others[0]} if others else {}

    def _storage_of(self, node: str, pool: str) -> str:
        """Identity of a node's storage; without one, the storage counts as shared by the pool."""
        state = self.agents.get(node)
        return state.facts.storage_id if state and state.facts and state.facts.storage_id else f"pool {pool}"

    def _unavailable_nodes(self, pool: str) -> list[str]:
        """Nodes that are, or may be, in `pool` and cannot be reached now; they may have different storages."""
        nodes = self.agents.items()
        unavailable = [(name, node) for name, node in nodes if not node.ready or not _has_answered(node)]
        return [name for name, node in unavailable if not node.facts or node.facts.pool == pool]


def _has_answered(node: Node) -> bool:
    """Whether a node has answered lately. Ray may list a node for a minute after it was cut off."""
    return node.silent_s(time.monotonic()) <= NODE_SILENT_S


def _where(source: Data, pool: str) -> str:
    return str(source["node"] if source["pool"] == pool else source["pool"])


def _copying(set_activity: SetActivity, activity: str, done_bytes: int, total: int) -> None:
    set_activity(f"{activity} ({done_bytes >> 20} of {total >> 20} MiB)")
