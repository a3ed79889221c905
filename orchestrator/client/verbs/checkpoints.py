"""Verbs of `checkpoints`, written by docs/generate.py. Change orchestrator/verbs/checkpoints.py instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from orchestrator.client.link import Downloaded, Link, Rows
    from orchestrator.client.server_connection import Bytes
    from orchestrator.views.checkpoint_results import (
        ConversionResult,
        CopyResult,
        DiffResult,
        ExportResult,
        ImportResult,
        PinResult,
        PruneResult,
        VerifyResult,
    )
    from orchestrator.views.checkpoints import (
        CheckpointDestination,
        CheckpointSummary,
        CheckpointView,
        ChunkView,
        CommittedView,
        IncomingView,
        InterruptedView,
        MovePlan,
    )


class Checkpoints:
    def __init__(self, link: Link):
        self._link = link

    def list(self, *, pool: str = "", prefix: str = "") -> Rows[CheckpointSummary]:
        """Summaries of the checkpoints below `prefix`, in one pool or in all."""
        result: Rows[CheckpointSummary] = self._link.plain("GET", "/v1/checkpoints", {"pool": pool, "prefix": prefix})
        return result

    def away(self, *, pool: str = "") -> Rows[str]:
        """A sentence for each storage whose checkpoints are not listed now, because its nodes do not respond."""
        result: Rows[str] = self._link.plain("GET", "/v1/checkpoints/away", {"pool": pool})
        return result

    def show(self, ref: str) -> CheckpointView:
        """Summary of one checkpoint's manifest: producer, step, tensors, bytes.

        - `ref`: POOL:PATH of a checkpoint, or of a folder for the newest in it
        """
        result: CheckpointView = self._link.plain("GET", "/v1/checkpoints/show", {"ref": ref})
        return result

    def plan(self, ref: str, to_kind: str, *, count: int = 1) -> MovePlan:
        """What `count` devices of `to_kind` would keep, convert or refuse, and whether the checkpoint fits.

        - `ref`: POOL:PATH of a checkpoint, or of a folder for the newest in it
        """
        result: MovePlan = self._link.plain(
            "GET", "/v1/checkpoints/plan", {"ref": ref, "to_kind": to_kind, "count": count}
        )
        return result

    def copy(
        self,
        source: str,
        target: str,
        *,
        to_kind: str = "",
        convert_at: Literal["source", "target"] = "source",
        on_lossy: Literal["error", "allow"] = "error",
        progress: Bytes | None = None,
        key: str = "",
    ) -> CopyResult:
        """Copy a checkpoint. Server-sent events: `progress` from time to time, then `result` or `error`. Closing the
        connection stops the copy.

        - `source`: POOL:PATH, or the URI of an object store
        - `target`: POOL:FOLDER, or the URI of an object store
        - `to_kind`: convert for this kind of device (default: copy bit by bit)
        - `convert_at`: the pool whose node converts
        - `on_lossy`: action if a conversion would change values
        - `progress`: called with bytes done and bytes in total
        - `key`: idempotency key: a repeated call with the same key and arguments counts once
        """
        result: CopyResult = self._link.operation(
            "/v1/checkpoints/copy",
            {},
            {"source": source, "target": target, "to_kind": to_kind, "convert_at": convert_at, "on_lossy": on_lossy},
            progress,
            key,
        )
        return result

    def verify(self, place: str, *, progress: Bytes | None = None) -> VerifyResult:
        """Read every byte of a checkpoint and compare with its hashes. Events as for a copy.

        - `place`: POOL:PATH, or the URI of an object store
        - `progress`: called with bytes done and bytes in total
        """
        result: VerifyResult = self._link.operation("/v1/checkpoints/verify", {}, {"place": place}, progress, "")
        return result

    def diff(self, a: str, b: str, *, progress: Bytes | None = None) -> DiffResult:
        """Compare two checkpoints tensor by tensor. Events as for a copy.

        - `a`: POOL:PATH of a checkpoint, or of a folder for the newest in it
        - `b`: POOL:PATH of a checkpoint, or of a folder for the newest in it
        - `progress`: called with bytes done and bytes in total
        """
        result: DiffResult = self._link.operation("/v1/checkpoints/diff", {}, {"a": a, "b": b}, progress, "")
        return result

    def convert(
        self,
        source: str,
        root: str,
        *,
        to_kind: str = "",
        dtype: Mapping[str, str] | None = None,
        on_lossy: Literal["error", "allow"] = "error",
        progress: Bytes | None = None,
        key: str = "",
    ) -> ConversionResult:
        """Write a copy in the dtypes that a kind computes with, or in those that `dtype` names. Events as for a
        copy.

        - `source`: POOL:PATH of a checkpoint, or of a folder for the newest in it
        - `root`: POOL:FOLDER that holds the step-… folders
        - `to_kind`: kind of device whose dtypes the result has, if `dtype` names none
        - `dtype`: dtype to convert to, by dtype or by pattern of tensor names
        - `on_lossy`: action if a conversion would change values
        - `progress`: called with bytes done and bytes in total
        - `key`: idempotency key: a repeated call with the same key and arguments counts once
        """
        result: ConversionResult = self._link.operation(
            "/v1/checkpoints/convert",
            {},
            {"source": source, "root": root, "to_kind": to_kind, "dtype": dtype, "on_lossy": on_lossy},
            progress,
            key,
        )
        return result

    def prune(
        self, root: str, keep: int, *, dry_run: bool = False, progress: Bytes | None = None, key: str = ""
    ) -> PruneResult:
        """Delete all but the newest undamaged checkpoints of a folder. Pinned ones remain. Events as for a copy.

        - `root`: POOL:FOLDER that holds the step-… folders
        - `keep`: number of checkpoints to keep
        - `dry_run`: delete nothing, only list what would be deleted
        - `progress`: called with bytes done and bytes in total
        - `key`: idempotency key: a repeated call with the same key and arguments counts once
        """
        result: PruneResult = self._link.operation(
            "/v1/checkpoints/prune", {}, {"root": root, "keep": keep, "dry_run": dry_run}, progress, key
        )
        return result

    def pin(self, path: str, *, remove: bool = False, progress: Bytes | None = None, key: str = "") -> PinResult:
        """Pin a checkpoint, so that it is never deleted as an old one, or remove its pin. Events as for a copy.

        - `path`: POOL:PATH of a checkpoint, or of a folder for the newest in it
        - `remove`: remove the pin
        - `progress`: called with bytes done and bytes in total
        - `key`: idempotency key: a repeated call with the same key and arguments counts once
        """
        result: PinResult = self._link.operation(
            "/v1/checkpoints/pin", {}, {"path": path, "remove": remove}, progress, key
        )
        return result

    def import_(
        self,
        source: str,
        *,
        root: str = "",
        format: str = "",
        step: int | None = None,
        drop: bool = False,
        progress: Bytes | None = None,
        key: str = "",
    ) -> ImportResult:
        """Import a file or folder of another library as a checkpoint. No code in it is run. Events as for a copy.

        - `source`: POOL:PATH of a file or folder of another library
        - `root`: POOL:FOLDER that holds the step-… folders
        - `format`: safetensors, torch, dcp, accelerate or trainer (default: detected)
        - `step`: training step of the checkpoint (default: read from the source)
        - `drop`: skip objects that cannot be imported, and invalid optimizer states
        - `progress`: called with bytes done and bytes in total
        - `key`: idempotency key: a repeated call with the same key and arguments counts once
        """
        result: ImportResult = self._link.operation(
            "/v1/checkpoints/import",
            {},
            {"source": source, "root": root, "format": format, "step": step, "drop": drop},
            progress,
            key,
        )
        return result

    def export(
        self,
        source: str,
        target: str,
        *,
        format: str = "safetensors",
        entry: str = "",
        progress: Bytes | None = None,
        key: str = "",
    ) -> ExportResult:
        """Write a checkpoint in the format of another library. Events as for a copy.

        - `source`: POOL:PATH of a checkpoint, or of a folder for the newest in it
        - `target`: POOL:PATH of the new file or folder
        - `format`: safetensors, torch, dcp, accelerate or trainer
        - `entry`: module to export if the checkpoint has several
        - `progress`: called with bytes done and bytes in total
        - `key`: idempotency key: a repeated call with the same key and arguments counts once
        """
        result: ExportResult = self._link.operation(
            "/v1/checkpoints/export",
            {},
            {"source": source, "target": target, "format": format, "entry": entry},
            progress,
            key,
        )
        return result

    def read_manifest(self, ref: str) -> Downloaded:
        """MANIFEST.json of a checkpoint, unchanged. The header Polyfleet-Checkpoint names the checkpoint, for a
        folder the newest in it.

        - `ref`: POOL:PATH of a checkpoint, or of a folder for the newest in it
        """
        return self._link.download("/v1/checkpoints/manifest", {"ref": ref})

    def read_chunk(self, ref: str, file: str, index: int) -> Downloaded:
        """One chunk of a checkpoint's file, at most 8 MiB.

        - `ref`: POOL:PATH/step-…, the checkpoint itself
        - `file`: as in the previous response
        - `index`: index of the chunk of 8 MiB
        """
        return self._link.download("/v1/checkpoints/chunk", {"ref": ref, "file": file, "index": index})

    def destination(self, target: str) -> CheckpointDestination:
        """The node that writes POOL:FOLDER."""
        result: CheckpointDestination = self._link.plain("GET", "/v1/checkpoints/place", {"target": target})
        return result

    def begin_upload(self, node: str, folder: str, name: str, manifest: bytes) -> IncomingView:
        """Begin to send a checkpoint with this manifest (`application/octet-stream`). The response names the chunks
        that are missing; the others have already arrived.

        - `node`: as in the previous response
        - `name`: as in the previous response
        """
        result: IncomingView = self._link.upload(
            "PUT",
            "/v1/checkpoints/incoming",
            {"node": node, "folder": folder, "name": name},
            manifest,
            "application/octet-stream",
        )
        return result

    def send_chunk(self, node: str, folder: str, name: str, file: str, index: int, data: bytes) -> ChunkView:
        """Send one chunk (`application/octet-stream`). Refused if it does not match the manifest.

        - `node`: as in the previous response
        - `name`: as in the previous response
        - `file`: as in the previous response
        - `index`: index of the chunk of 8 MiB
        """
        result: ChunkView = self._link.upload(
            "PUT",
            "/v1/checkpoints/incoming/chunk",
            {"node": node, "folder": folder, "name": name, "file": file, "index": index},
            data,
            "application/octet-stream",
        )
        return result

    def interrupt_upload(self, node: str, folder: str, name: str) -> InterruptedView:
        """Interrupt a copy. Chunks that have arrived remain for the next try, which need not wait.

        - `node`: as in the previous response
        - `name`: as in the previous response
        """
        result: InterruptedView = self._link.plain(
            "DELETE", "/v1/checkpoints/incoming", {"node": node, "folder": folder, "name": name}
        )
        return result

    def commit_upload(self, node: str, folder: str, name: str, *, key: str = "") -> CommittedView:
        """Complete a copy: all chunks are read back and verified, then the checkpoint is committed.

        - `folder`: folder in the pool's storage
        - `key`: idempotency key: a repeated call with the same key and arguments counts once
        """
        result: CommittedView = self._link.plain(
            "POST", "/v1/checkpoints/arrived", {}, {"node": node, "folder": folder, "name": name}, key=key, is_slow=True
        )
        return result
