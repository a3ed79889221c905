"""Receive a checkpoint whose chunks another process writes here: list missing ones, and commit.

That process writes each chunk at its position below the folder that `missing` returns. `arrive` does not trust it: it
reads everything back, and only then commits the checkpoint. Both read the manifest from a file, as it was received.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.input.untrusted_files import read_bytes
from workers.checkpoint.disk.writer import ByteProgress
from workers.checkpoint.format.manifest import MAX_MANIFEST_BYTES
from workers.checkpoint.transfer.receiver import CheckpointReceiver
from workers.errors import CheckpointError

Progress = Callable[[int, int], None]


def missing(root: str, name: str, manifest: str, progress: Progress | None = None) -> dict[str, Any]:
    """List missing chunks: {"arrived", "folder", "chunks": [[file, index, size]], "step", "files", "bytes"}.
    Chunks that other checkpoints of `root` contain are copied from there.
    """
    with _receiver(root, name, manifest) as receiver:
        files = receiver.manifest.files
        reply = {"arrived": receiver.is_complete, "folder": str(receiver.folder), "step": receiver.manifest.step}
        reply |= {"files": len(files), "bytes": receiver.manifest.size_bytes()}
        counter = ByteProgress(receiver.manifest.size_bytes(), progress)
        chunks = [] if receiver.is_complete else receiver.missing(counter.add)
        return reply | {"chunks": [[*chunk, receiver.manifest.size_of(chunk)] for chunk in chunks]}


def arrive(root: str, name: str, manifest: str, progress: Progress | None = None) -> dict[str, Any]:
    """Verify all chunks and commit the checkpoint: {"path"}.
    Raises CheckpointError if a chunk is missing or damaged. Then there is no checkpoint, and correct chunks stay
    for the next try.
    """
    with _receiver(root, name, manifest) as receiver:
        if not receiver.is_complete:
            missing_chunks = receiver.missing(ByteProgress(receiver.manifest.size_bytes(), progress).add)
            if missing_chunks:
                file, index = missing_chunks[0]
                raise CheckpointError(
                    f"{name}/{file}: chunk {index + 1} is missing or damaged ({len(missing_chunks)} such chunks)",
                    "copy it again: chunks that arrived are not sent again",
                )
            receiver.commit()
        return {"path": str(receiver.final_folder)}


def _receiver(root: str, name: str, manifest: str) -> CheckpointReceiver:
    return CheckpointReceiver(Path(root), name, read_bytes(Path(manifest), MAX_MANIFEST_BYTES))
