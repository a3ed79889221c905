"""Marker objects beside the manifest of a checkpoint in an object store, and its deletion.

A pin protects it from deletion, a hold does so while it is downloaded, and a deletion mark shows that its deletion has
started. None of them is part of the checkpoint, and they are never downloaded with it.
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

from cluster.errors import PolyfleetError
from workers.checkpoint.disk.pins import HOLD, HOLD_S, PIN
from workers.checkpoint.format.manifest import NAME
from workers.checkpoint.transfer.stores import ObjectStore

DELETION = ".deleting"
RENEW_EVERY_S = HOLD_S / 4
MAX_HOLD_BYTES = 64
Progress = Callable[[int, int], None]


def pin_objects(checkpoint: ObjectStore) -> None:
    """Protect a checkpoint from deletion until it is unpinned. It may be one that is uploaded later."""
    checkpoint.write(PIN, iter([b"pinned\n"]))


def unpin_objects(checkpoint: ObjectStore) -> None:
    checkpoint.remove(PIN)


def is_protected(checkpoint: ObjectStore, names: Collection[str]) -> bool:
    """Check whether a checkpoint that consists of the objects `names` is pinned or held."""
    return PIN in names or (HOLD in names and _is_held(checkpoint))


def _is_held(checkpoint: ObjectStore) -> bool:
    """The clocks of machines may differ by less than a hold lasts."""
    try:
        text = bytearray(min(checkpoint.size_bytes(HOLD), MAX_HOLD_BYTES))
        checkpoint.read(HOLD, 0, memoryview(text))
        return abs(time.time() - float(text)) < HOLD_S
    except (PolyfleetError, ValueError):
        return False


@contextmanager
def hold_objects(checkpoint: ObjectStore, progress: Progress | None) -> Iterator[Progress]:
    """Hold a checkpoint; the function that this yields renews the hold, and then calls `progress`.

    Best effort: a process that may only read the store cannot hold anything in it.
    """
    renewed_s = float("-inf")

    def renew(done: int, total: int) -> None:
        nonlocal renewed_s
        if time.monotonic() - renewed_s > RENEW_EVERY_S:
            renewed_s = time.monotonic()
            with suppress(PolyfleetError):
                checkpoint.write(HOLD, iter([f"{time.time():.0f}\n".encode()]))
        if progress is not None:
            progress(done, total)

    renew(0, 0)
    try:
        yield renew
    finally:
        with suppress(PolyfleetError):
            checkpoint.remove(HOLD)


def delete_objects(checkpoint: ObjectStore) -> None:
    """Delete a checkpoint: its manifest first, so that what is left is not listed, and its deletion mark last.

    If this is interrupted, `is_half_deleted` finds what is left. Raises CheckpointError.
    """
    checkpoint.write(DELETION, iter([b"its deletion has started\n"]))
    checkpoint.remove(NAME)
    for name in checkpoint.names():
        if name != DELETION:
            checkpoint.remove(name)
    checkpoint.remove(DELETION)


def is_half_deleted(names: Collection[str]) -> bool:
    return DELETION in names and NAME not in names


def cancel_deletion(checkpoint: ObjectStore) -> None:
    """Remove the deletion mark of a checkpoint that is about to be uploaded again."""
    if checkpoint.exists(DELETION):  # most credentials need not be able to delete
        checkpoint.remove(DELETION)
