"""A checkpoint that somebody else fetches chunk by chunk into a folder here: what is missing, and the commit.

Whoever fetches writes each chunk at its place below the folder that `missing` tells; `arrive` believes nothing of that,
reads all of it back, and only then is there a checkpoint. Both take the manifest from a file, as it came.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.untrusted_files import read_bytes
from workers.checkpoint.format.chunks import CHUNK_BYTES
from workers.checkpoint.format.manifest import LARGEST_BYTES
from workers.checkpoint.transfer.receiver import CheckpointReceiver
from workers.errors import CheckpointError

Progress = Callable[[int, int], None]


def missing(root: str, name: str, manifest: str, progress: Progress | None = None) -> dict[str, Any]:
    """{"arrived", "folder", "chunks": [[file, index, bytes]], "step", "files", "bytes"}. Chunks that lie in other
    checkpoints of `root` are taken from there.
    """
    with _incoming(root, name, manifest) as incoming:
        files = incoming.manifest.files
        told = {"arrived": incoming.arrived, "folder": str(incoming.folder), "step": incoming.manifest.step}
        told |= {"files": len(files), "bytes": incoming.manifest.size_bytes()}
        seen = _Seen(incoming.manifest.size_bytes(), progress)
        absent = [] if incoming.arrived else incoming.missing(seen)
        sizes = ((file, index, min(CHUNK_BYTES, files[file].bytes - index * CHUNK_BYTES)) for file, index in absent)
        return told | {"chunks": [list(one) for one in sizes]}


def arrive(root: str, name: str, manifest: str, progress: Progress | None = None) -> dict[str, Any]:
    """{"path"}. Raises CheckpointError where a chunk is missing, or is not what the manifest says: nothing counts then,
    and what is right stays for the next try.
    """
    with _incoming(root, name, manifest) as incoming:
        if not incoming.arrived:
            wrong = incoming.missing(_Seen(incoming.manifest.size_bytes(), progress))
            if wrong:
                file, index = wrong[0]
                raise CheckpointError(
                    f"{name}/{file}: chunk {index + 1} did not arrive as it was sent ({len(wrong)} such chunks)",
                    "copy it again: what arrived is kept",
                )
            incoming.commit()
        return {"path": str(incoming.final)}


def _incoming(root: str, name: str, manifest: str) -> CheckpointReceiver:
    return CheckpointReceiver(Path(root), name, read_bytes(Path(manifest), LARGEST_BYTES))


class _Seen:
    def __init__(self, total: int, progress: Progress | None):
        self._total, self._done, self._progress = total, 0, progress

    def __call__(self, size_bytes: int) -> None:
        self._done += size_bytes
        if self._progress is not None:
            self._progress(self._done, self._total)
