"""Receive uploaded code archives into the home."""

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import anyio.to_thread
from fastapi import Request

from cluster.errors import FleetError, UserError
from cluster.paths import private_dir
from orchestrator.server.http.hub import Hub

PIECE_BYTES = 1024 * 1024
INCOMING = ".incoming-"


def remove_partial_uploads(home: Path) -> None:
    """Remove partial uploads of a previous server that was killed; a home has only one running server."""
    for partial in (home / "packages").glob(f"{INCOMING}*"):
        partial.unlink(missing_ok=True)


async def receive_code_archive(request: Request, sha: str) -> None:
    """Write the request's body to a private file, check its hash and store it. On an error, no file remains."""
    hub: Hub = request.app.state.hub
    folder = private_dir(hub.home / "packages")
    with tempfile.NamedTemporaryFile(dir=folder, prefix=INCOMING, delete=False) as part:
        path = Path(part.name)
        try:
            received = await _store(request, part)
            if received != sha:
                raise UserError(
                    f"the code archive has the SHA-256 {received[:12]}… instead of {sha[:12]}…, its name",
                    "send it again",
                )
            await anyio.to_thread.run_sync(hub.service.store_code_archive, sha, path)
        except OSError as e:
            raise FleetError(
                f"the code archive could not be stored: {e.strerror or e}", f"free disk space under {folder}"
            ) from e
        finally:
            path.unlink(missing_ok=True)


async def _store(request: Request, part: Any) -> str:
    digest, waiting = hashlib.sha256(), bytearray()

    def store() -> None:
        digest.update(waiting)
        part.write(waiting)
        waiting.clear()

    async for chunk in request.stream():
        waiting += chunk
        if len(waiting) >= PIECE_BYTES:
            await anyio.to_thread.run_sync(store)
    store()
    part.flush()
    return digest.hexdigest()
