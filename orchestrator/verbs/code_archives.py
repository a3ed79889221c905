"""Code archives: zip archives of submitted folders, named by their SHA-256."""

from typing import Annotated

from cluster.errors import NotFound
from orchestrator.server.http.archive_upload import receive_code_archive
from orchestrator.server.http.hub import Hub
from orchestrator.verbs.declare import Arg, RequestBody, Role, Upload, verb
from orchestrator.views.files import CodeArchiveView

Sha = Annotated[str, Arg("SHA-256 of the archive, hexadecimal", pattern="^[0-9a-f]{64}$")]
ARCHIVE_BODY = RequestBody("application/zip", 512 << 20)


@verb("HEAD /v1/code-archives/{sha}", least=Role.MEMBER)
def check(hub: Hub, sha: Sha) -> None:
    """200 if the server has the code archive, so that it need not be sent again, else 404."""
    if not hub.service.code_archives.is_stored(sha):
        raise NotFound(f"no code archive {sha[:12]}", "send it with PUT")


@verb("PUT /v1/code-archives/{sha}", least=Role.MEMBER, status=201, body=ARCHIVE_BODY)
async def put(hub: Hub, sha: Sha, upload: Upload) -> CodeArchiveView:
    """Store a zip archive (`Content-Type: application/zip`, at most 512 MiB). Refused if its SHA-256 differs."""
    await receive_code_archive(hub, sha, upload.chunks)
    return {"code_archive": sha}
