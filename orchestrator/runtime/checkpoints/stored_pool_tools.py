"""Prune and pin checkpoints of a pool whose storage is an object store: there first, then the copies on its nodes."""

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cluster.errors import FleetError
from cluster.input.checkpoint_location import CheckpointLocation, reference_fields
from orchestrator.runtime.checkpoints.checkpoint_search import CheckpointMatch, PoolStorages

if TYPE_CHECKING:
    from orchestrator.runtime.agents.agents import Agents

Progress = Callable[[int, int], None]
RunTool = Callable[[str, str, dict[str, Any], Progress], Any]
COPIES_S = 120.0


class StoredPoolTools:
    """Tools for pools below the URI `object_store`. `run_tool` runs a tool on a node.

    A node that does not respond keeps its copies and their pins: the next call changes them. All methods may raise
    FleetError.
    """

    def __init__(self, agents: "Agents", storages: PoolStorages, run_tool: RunTool, object_store: str):
        self._agents, self._storages, self._run_tool, self._object_store = agents, storages, run_tool, object_store

    def prune(self, root: CheckpointLocation, options: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """Delete all but the newest `keep` checkpoints that are in the store, and the nodes' copies of those."""
        arguments = {"root": {"uri": f"{self._object_store}/{root.path}"}, **options}
        result = self._run_tool(self._storages.node_of(root.pool), "prune_stored", arguments, progress)
        oldest = result.pop("oldest")
        if not result["dry_run"]:
            self._call_nodes(root.pool, "remove_old_copies", root.path, oldest, result["kept"])
        return {"root": str(root), **result}

    def pin(self, match: CheckpointMatch, remove: bool) -> dict[str, Any]:
        """Pin a checkpoint or remove its pin. It may be one that is not uploaded yet."""
        location = match.location
        arguments = {"path": {"uri": f"{self._object_store}/{location.path}"}, "remove": remove}
        result: dict[str, Any] = self._run_tool(match.node, "pin_stored", arguments, lambda done, total: None)
        self._call_nodes(location.pool, "pin_checkpoint_copy", location.path, remove)
        return result | reference_fields(location.pool, location.path)

    def _call_nodes(self, pool: str, method: str, *arguments: Any) -> None:
        for node in self._storages.nodes_of(pool):
            with suppress(FleetError):
                self._agents.call(node, method, *arguments, timeout_s=COPIES_S)
