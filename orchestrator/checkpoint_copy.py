"""What the server does with checkpoints on request: tools on a node, and copies, converted on the way if asked."""

import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cluster import checkpoint_location
from cluster.catalogue import require_known_kind
from cluster.errors import PolyfleetError, SpecError, UserError, nearest
from orchestrator.checkpoints import CheckpointService, Progress

Options = dict[str, type]
OPTIONS: dict[str, Options] = {
    "verify": {},
    "diff": {},
    "convert": {"to_kind": str, "dtype": dict, "on_lossy": str},
    "prune": {"keep": int, "dry_run": bool},
    "pin": {"remove": bool},
    "import": {"format": str, "step": int, "drop": bool},
    "export": {"format": str, "entry": str},
}


def run(checkpoints: CheckpointService, verb: str, arguments: dict[str, Any], progress: Progress) -> Any:
    """A tool by name, with places as POOL:PATH or URIs. Raises SpecError for an argument it does not take."""
    if verb not in OPTIONS:
        raise SpecError("verb", f"no tool {verb!r}", nearest(verb, tuple(OPTIONS)))
    taken, options = checkpoint_location.TOOLS[verb], OPTIONS[verb]
    for name, value in arguments.items():
        wanted = str if name in taken else options.get(name)
        if wanted is None:
            raise SpecError(name, f"`{verb}` takes no {name!r}", nearest(name, (*taken, *options)))
        if type(value) is not wanted:
            raise SpecError(name, f"{value!r} is no {wanted.__name__}", f"give a {wanted.__name__}")
    if missing := [name for name in taken if name not in arguments]:
        raise SpecError(missing[0], "is missing", "give POOL:PATH")
    named = {name: arguments[name] for name in taken}
    return checkpoints.tool(verb, named, {k: v for k, v in arguments.items() if k not in taken}, progress)


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """`source` and `target` are POOL:PATH or URIs. With `to_kind` what arrives is the copy `convert` would write."""

    source: str
    target: str
    to_kind: str = ""
    convert_at: str = "source"
    on_lossy: str = "error"


def copy(checkpoints: CheckpointService, move: CopyRequest, progress: Progress) -> dict[str, Any]:
    """Copy to another pool or an object store, converted on the way if asked. Bits stay as they are otherwise."""
    for field, place in (("source", move.source), ("target", move.target)):
        checkpoint_location.parse_location(place, field)
    if not move.to_kind:
        return _copied(checkpoints, move.source, move.target, progress)
    require_kind(move.to_kind)
    side = _side(move)
    pool = checkpoint_location.parse_pool_path(move.source if side == "source" else move.target, side).pool
    aside = f"{pool}:.converting-{secrets.token_hex(4)}"
    steps = _convert_then_copy if side == "source" else _copy_then_convert
    try:
        return steps(checkpoints, move, aside, progress)
    finally:
        with suppress(PolyfleetError):  # a left-over aside is hidden, and the first error is the one to tell
            checkpoints.discard(checkpoint_location.parse_pool_path(aside))


def require_kind(word: str) -> None:
    """Before anything is copied. Raises SpecError for a kind that nobody lists, naming the nearest."""
    try:
        require_known_kind(word)
    except UserError as e:
        raise SpecError("to_kind", e.message, e.remedy) from None


def _side(move: CopyRequest) -> str:
    """Where it can be converted: on a node of a pool."""
    stores = {"source": checkpoint_location.is_uri(move.source), "target": checkpoint_location.is_uri(move.target)}
    if all(stores.values()):
        raise SpecError("to_kind", "neither end is a pool, so no node converts it", "copy it to a pool first")
    wanted = move.convert_at
    return wanted if not stores[wanted] else next(side for side, store in stores.items() if not store)


def _convert_then_copy(
    checkpoints: CheckpointService, move: CopyRequest, aside: str, progress: Progress
) -> dict[str, Any]:
    told = _convert(checkpoints, move, move.source, aside, progress)
    moved = _copied(checkpoints, told["path"], move.target, progress)
    return moved | {"source": move.source, "conversion": told | {"path": moved["target"]}}


def _copy_then_convert(
    checkpoints: CheckpointService, move: CopyRequest, aside: str, progress: Progress
) -> dict[str, Any]:
    moved = _copied(checkpoints, move.source, aside, progress)
    told = _convert(checkpoints, move, moved["target"], move.target, progress)
    return moved | {"target": told["path"], "conversion": told}


def _convert(
    checkpoints: CheckpointService, move: CopyRequest, source: str, root: str, progress: Progress
) -> dict[str, Any]:
    options = {"to_kind": move.to_kind, "on_lossy": move.on_lossy}
    told: dict[str, Any] = checkpoints.tool("convert", {"source": source, "root": root}, options, progress)
    return told


def _copied(checkpoints: CheckpointService, source: str, target: str, progress: Progress) -> dict[str, Any]:
    if not checkpoint_location.is_uri(source) and not checkpoint_location.is_uri(target):
        return checkpoints.copy(source, target, progress)
    told: dict[str, Any] = checkpoints.tool("copy", {"source": source, "target": target}, {}, progress)
    return {"source": source, **told}
