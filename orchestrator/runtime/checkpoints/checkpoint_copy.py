"""Copies of checkpoints that clients request, with optional conversion."""

import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cluster.catalogue import resolve_kind
from cluster.errors import PolyfleetError, SpecError, UserError
from cluster.input import checkpoint_location
from orchestrator.runtime.checkpoints.checkpoints import CheckpointService, Progress


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """Copy `source` to `target`, POOL:PATH or URIs. With `to_kind` the target is what `convert` would write."""

    source: str
    target: str
    to_kind: str = ""
    convert_at: str = "source"
    on_lossy: str = "error"


def copy(checkpoints: CheckpointService, request: CopyRequest, progress: Progress) -> dict[str, Any]:
    """Copy to another pool or an object store: converted if `to_kind` is set, else bit by bit."""
    for field, location in (("source", request.source), ("target", request.target)):
        checkpoint_location.parse_location(location, field)
    if not request.to_kind:
        return _copy_unchanged(checkpoints, request.source, request.target, progress)
    check_kind(request.to_kind)
    side = _choose_converting_end(request)
    pool = checkpoint_location.parse_pool_path(request.source if side == "source" else request.target, side).pool
    staging = f"{pool}:.converting-{secrets.token_hex(4)}"
    steps = _convert_then_copy if side == "source" else _copy_then_convert
    try:
        return steps(checkpoints, request, staging, progress)
    finally:
        with suppress(PolyfleetError):  # a remaining staging folder is hidden; the first error is the one to raise
            checkpoints.discard(checkpoint_location.parse_pool_path(staging))


def check_kind(kind: str) -> None:
    """Check `to_kind` before anything is copied. Raises SpecError with the nearest valid name for an unknown kind."""
    try:
        resolve_kind(kind)
    except UserError as e:
        raise SpecError("to_kind", e.message, e.remedy) from None


def _choose_converting_end(request: CopyRequest) -> str:
    """Choose the end at which to convert: it must be a pool, because a node of the pool converts."""
    is_store = {
        "source": checkpoint_location.is_uri(request.source),
        "target": checkpoint_location.is_uri(request.target),
    }
    if all(is_store.values()):
        raise SpecError(
            "to_kind", "neither end is a pool, so no node can convert", "copy the checkpoint to a pool first"
        )
    preferred = request.convert_at
    return preferred if not is_store[preferred] else next(side for side, store in is_store.items() if not store)


def _convert_then_copy(
    checkpoints: CheckpointService, request: CopyRequest, staging: str, progress: Progress
) -> dict[str, Any]:
    converted = _convert(checkpoints, request, request.source, staging, progress)
    copied = _copy_unchanged(checkpoints, converted["ref"], request.target, progress)
    return copied | {
        "source": request.source,
        "conversion": converted | checkpoint_location.split_reference(copied["target"]),
    }


def _copy_then_convert(
    checkpoints: CheckpointService, request: CopyRequest, staging: str, progress: Progress
) -> dict[str, Any]:
    copied = _copy_unchanged(checkpoints, request.source, staging, progress)
    converted = _convert(checkpoints, request, copied["target"], request.target, progress)
    return copied | {"target": converted["ref"], "conversion": converted}


def _convert(
    checkpoints: CheckpointService, request: CopyRequest, source: str, root: str, progress: Progress
) -> dict[str, Any]:
    options = {"to_kind": request.to_kind, "on_lossy": request.on_lossy}
    result: dict[str, Any] = checkpoints.tool("convert", {"source": source, "root": root}, options, progress)
    return result


def _copy_unchanged(checkpoints: CheckpointService, source: str, target: str, progress: Progress) -> dict[str, Any]:
    if not checkpoint_location.is_uri(source) and not checkpoint_location.is_uri(target):
        return checkpoints.copy(source, target, progress)
    result: dict[str, Any] = checkpoints.tool("copy", {"source": source, "target": target}, {}, progress)
    return {"source": source, **result}
