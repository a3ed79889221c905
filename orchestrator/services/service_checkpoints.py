"""Operations of the service for stored checkpoints: list them, run tools on them, copy them to or from a client.

Copies are sent in pieces, so that none is completely in memory and any piece can be requested again.
"""

from typing import Any

from orchestrator.runtime.checkpoints import checkpoint_copy
from orchestrator.runtime.checkpoints.checkpoints import CheckpointService, Progress
from orchestrator.runtime.health.fleet_ready import FleetReadiness


class CheckpointVerbs:
    """Checkpoint methods of Service."""

    readiness: FleetReadiness
    checkpoint_service: CheckpointService

    def _stored_checkpoints(self) -> CheckpointService:
        """Raise FleetError if no fleet is running; it names the nodes whose storages have the checkpoints."""
        nodes = "; ".join(f"pool {pool}: {', '.join(names)}" for pool, names in self.readiness.pools().items())
        self.readiness.check_served(f"checkpoints are read through its nodes ({nodes})" if nodes else "")
        return self.checkpoint_service

    def checkpoints(self, pool: str, prefix: str) -> list[dict[str, Any]]:
        return self._stored_checkpoints().list(pool, prefix)

    def checkpoints_away(self, pool: str) -> list[str]:
        return self._stored_checkpoints().away(pool)

    def checkpoint_show(self, ref: str) -> dict[str, Any]:
        return self._stored_checkpoints().show(ref)

    def checkpoint_plan(self, ref: str, to_kind: str, count: int = 1) -> dict[str, Any]:
        return self._stored_checkpoints().plan(ref, to_kind, count)

    def checkpoint_copy(self, order: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """`order` has source, target, to_kind, convert_at and on_lossy."""
        return checkpoint_copy.copy(self._stored_checkpoints(), checkpoint_copy.CopyRequest(**order), progress)

    def checkpoint_tool(self, verb: str, arguments: dict[str, Any], progress: Progress) -> Any:
        return checkpoint_copy.run(self._stored_checkpoints(), verb, arguments, progress)

    # -- between a client and a pool

    def checkpoint_manifest(self, ref: str) -> dict[str, Any]:
        return self._stored_checkpoints().manifest(ref)

    def checkpoint_chunk(self, ref: str, file: str, index: int) -> bytes:
        return self._stored_checkpoints().chunk(ref, file, index)

    def checkpoint_destination(self, target: str) -> dict[str, Any]:
        return self._stored_checkpoints().destination(target)

    def checkpoint_begin(self, node: str, folder: str, name: str, text: bytes) -> dict[str, Any]:
        return self._stored_checkpoints().begin(node, folder, name, text)

    def checkpoint_write(self, node: str, folder: str, name: str, file: str, index: int, data: bytes) -> None:
        self._stored_checkpoints().write(node, (folder, name), file, index, data)

    def checkpoint_interrupt(self, node: str, folder: str, name: str) -> None:
        self._stored_checkpoints().leave(node, folder, name)

    def checkpoint_commit(self, node: str, folder: str, name: str) -> dict[str, Any]:
        return self._stored_checkpoints().commit(node, folder, name)
