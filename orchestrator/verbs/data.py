"""Input data of jobs from a client's machine: sent as an upload without a node, stored by content hash."""

from typing import Annotated

from cluster.errors import NotFound
from orchestrator.server.http.hub import Hub
from orchestrator.verbs.declare import Arg, Role, verb
from orchestrator.views.files import DataView

Sha = Annotated[str, Arg("SHA-256 of a file, or of a folder's list of hashes", pattern="^[0-9a-f]{64}$")]
UploadId = Annotated[str, Arg(pattern="^[0-9a-z-]{8,64}$")]
Single = Annotated[str, Arg("path of the only file in the upload, or empty", max_length=1100)]


@verb("HEAD /v1/data/{sha}", least=Role.MEMBER, slow=True)
def check(hub: Hub, sha: Sha) -> None:
    """200 if the server has the data, so that it need not be sent again, else 404."""
    if not hub.service.data.is_stored(sha):
        raise NotFound(f"no data {sha[:12]}", "send it: POST /v1/uploads/{upload} with an empty node")


@verb("POST /v1/data/{sha}", least=Role.MEMBER, status=201, idempotent=True, slow=True)
def store(hub: Hub, sha: Sha, upload: UploadId, single: Single = "") -> DataView:
    """Complete the upload `upload`, sent with an empty node; `single` is its only file, "" for a folder. All data is
    hashed; it is refused if the hash differs.
    """
    stored = hub.service.data.store(upload, sha, single)
    return {"sha256": stored.sha256, "bytes": stored.bytes, "files": stored.files}
