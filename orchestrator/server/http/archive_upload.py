"""Receive uploaded code archives into the home."""

import hashlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio.to_thread

from cluster.errors import FleetError, UserError
from cluster.paths import private_dir
from orchestrator.server.http.hub import Hub

PIECE_BYTES = 1024 * 1024
INCOMING = ".incoming-"


def remove_partial_uploads(home: Path) -> None:
    """Remove partial uploads of a previous server that was killed; a home has only one running server."""
    for partial in (home / "packages").glob(f"{INCOMING}*"):
        partial.unlink(missing_ok=True)


async def receive_code_archive(hub: Hub, sha: str, chunks: AsyncIterator[bytes]) -> None:
    """Write the chunks to a private file, check their hash and store it. On an error, no file remains.

    Raises UserError for another hash or an archive that is refused, FleetError if the disk is full.
    """
    folder = private_dir(hub.home / "packages")
    with tempfile.NamedTemporaryFile(dir=folder, prefix=INCOMING, delete=False) as part:
        path = Path(part.name)
        try:
            received = await _write(part, chunks)
            if received != sha:
                raise UserError(
                    f"the code archive has the SHA-256 {received[:12]}… instead of {sha[:12]}…, its name",
                    "send it again",
                )
            await anyio.to_thread.run_sync(hub.service.code_archives.store, sha, path)
        except OSError as e:
            raise FleetError(
                f"the code archive could not be stored: {e.strerror or e}", f"free disk space under {folder}"
            ) from e
        finally:
            path.unlink(missing_ok=True)


async def _write(part: Any, chunks: AsyncIterator[bytes]) -> str:
    """Write the chunks to a file; return their SHA-256, hexadecimal."""
    digest, waiting = hashlib.sha256(), bytearray()

    def write() -> None:
        digest.update(waiting)
        part.write(waiting)
        waiting.clear()

    async for chunk in chunks:
        waiting += chunk
        if len(waiting) >= PIECE_BYTES:
            await anyio.to_thread.run_sync(write)
    write()
    part.flush()
    return digest.hexdigest()
