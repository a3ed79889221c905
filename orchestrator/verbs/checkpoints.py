"""Checkpoints in the storages of pools: list, check, copy and change them, and their transfer from and to a client.

A transfer is in pieces, so that none is completely in memory and any piece can be requested or sent again.
"""

from typing import Annotated, Literal, cast
from urllib.parse import quote

from pydantic import Strict

from cluster.errors import SpecError
from orchestrator.runtime.checkpoints import checkpoint_copy
from orchestrator.runtime.checkpoints.checkpoint_copy import CopyRequest
from orchestrator.runtime.checkpoints.checkpoints import CheckpointService
from orchestrator.server.http.hub import Hub
from orchestrator.verbs.declare import BINARY, Arg, Download, Progress, RequestBody, Role, verb
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

Ref = Annotated[str, Arg("POOL:PATH of a checkpoint, or of a folder for the newest in it")]
Checkpoint = Annotated[str, Arg("POOL:PATH/step-…, the checkpoint itself")]
DeviceCount = Annotated[int, Arg(min=1, max=1_000_000)]
Source = Annotated[str, Arg("POOL:PATH, or the URI of an object store")]
Target = Annotated[str, Arg("POOL:FOLDER, or the URI of an object store")]
ToKind = Annotated[str, Arg("convert for this kind of device (default: copy bit by bit)")]
DtypesOfKind = Annotated[str, Arg("kind of device whose dtypes the result has, if `dtype` names none")]
ConvertAt = Annotated[Literal["source", "target"], Arg("the pool whose node converts")]
OnLossy = Annotated[Literal["error", "allow"], Arg("action if a conversion would change values")]
Root = Annotated[str, Arg("POOL:FOLDER that holds the step-… folders")]
Dtypes = Annotated[
    dict[str, str] | None, Arg("dtype to convert to, by dtype or by pattern of tensor names", max_length=1000)
]
Keep = Annotated[int, Strict(), Arg("number of checkpoints to keep")]
DryRun = Annotated[bool, Strict(), Arg("delete nothing, only list what would be deleted")]
RemovePin = Annotated[bool, Strict(), Arg("remove the pin")]
ImportSource = Annotated[str, Arg("POOL:PATH of a file or folder of another library")]
ImportFormat = Annotated[str, Arg("safetensors, torch, dcp, accelerate or trainer (default: detected)")]
Step = Annotated[int | None, Arg("training step of the checkpoint (default: read from the source)")]
Drop = Annotated[bool, Strict(), Arg("skip objects that cannot be imported, and invalid optimizer states")]
ExportTarget = Annotated[str, Arg("POOL:PATH of the new file or folder")]
ExportFormat = Annotated[str, Arg("safetensors, torch, dcp, accelerate or trainer")]
Entry = Annotated[str, Arg("module to export if the checkpoint has several")]
Name = Annotated[str, Arg("as in the previous response", max_length=255)]
Index = Annotated[int, Arg("index of the chunk of 8 MiB")]
Node = Annotated[str, Arg(max_length=255)]
Folder = Annotated[str, Arg("folder in the pool's storage", min_length=1, max_length=1100)]
StepName = Annotated[str, Arg(pattern="^step-[0-9]{8,}-[0-9a-f]{8}$", max_length=64)]
MANIFEST_BODY = RequestBody(BINARY, 256 << 20)


@verb("GET /v1/checkpoints", least=Role.VIEWER, slow=True)
def list_(hub: Hub, pool: str = "", prefix: str = "") -> list[CheckpointSummary]:
    """Summaries of the checkpoints below `prefix`, in one pool or in all."""
    return cast(list[CheckpointSummary], _checkpoints(hub).list(pool, prefix))


@verb("GET /v1/checkpoints/away", least=Role.VIEWER, slow=True)
def away(hub: Hub, pool: str = "") -> list[str]:
    """A sentence for each storage whose checkpoints are not listed now, because its nodes do not respond."""
    return _checkpoints(hub).away(pool)


@verb("GET /v1/checkpoints/show", least=Role.VIEWER, slow=True)
def show(hub: Hub, ref: Ref) -> CheckpointView:
    """Summary of one checkpoint's manifest: producer, step, tensors, bytes."""
    return cast(CheckpointView, _checkpoints(hub).show(ref))


@verb("GET /v1/checkpoints/plan", least=Role.VIEWER, slow=True)
def plan(hub: Hub, ref: Ref, to_kind: str, count: DeviceCount = 1) -> MovePlan:
    """What `count` devices of `to_kind` would keep, convert or refuse, and whether the checkpoint fits."""
    return _checkpoints(hub).plan(ref, to_kind, count)


@verb("POST /v1/checkpoints/copy", least=Role.MEMBER)
def copy(
    hub: Hub,
    source: Source,
    target: Target,
    to_kind: ToKind = "",
    convert_at: ConvertAt = "source",
    on_lossy: OnLossy = "error",
    *,
    progress: Progress,
) -> CopyResult:
    """Copy a checkpoint. Server-sent events: `progress` from time to time, then `result` or `error`. Closing the
    connection stops the copy.
    """
    request = CopyRequest(source, target, to_kind, convert_at, on_lossy)
    return cast(CopyResult, checkpoint_copy.copy(_checkpoints(hub), request, progress))


@verb("POST /v1/checkpoints/verify", least=Role.MEMBER, idempotent=True)
def verify(hub: Hub, place: Source, progress: Progress) -> VerifyResult:
    """Read every byte of a checkpoint and compare with its hashes. Events as for a copy."""
    return cast(VerifyResult, _checkpoints(hub).tool("verify", {"place": place}, {}, progress))


@verb("POST /v1/checkpoints/diff", least=Role.MEMBER, idempotent=True)
def diff(hub: Hub, a: Ref, b: Ref, progress: Progress) -> DiffResult:
    """Compare two checkpoints tensor by tensor. Events as for a copy."""
    return cast(DiffResult, _checkpoints(hub).tool("diff", {"a": a, "b": b}, {}, progress))


@verb("POST /v1/checkpoints/convert", least=Role.MEMBER)
def convert(
    hub: Hub,
    source: Ref,
    root: Root,
    to_kind: DtypesOfKind = "",
    dtype: Dtypes = None,
    on_lossy: OnLossy = "error",
    *,
    progress: Progress,
) -> ConversionResult:
    """Write a copy in the dtypes that a kind computes with, or in those that `dtype` names. Events as for a copy."""
    options = {"to_kind": to_kind, "on_lossy": on_lossy} | ({"dtype": dtype} if dtype else {})
    locations = {"source": source, "root": root}
    return cast(ConversionResult, _checkpoints(hub).tool("convert", locations, options, progress))


@verb("POST /v1/checkpoints/prune", least=Role.MEMBER)
def prune(hub: Hub, root: Root, keep: Keep, dry_run: DryRun = False, *, progress: Progress) -> PruneResult:
    """Delete all but the newest undamaged checkpoints of a folder. Pinned ones remain. Events as for a copy."""
    options = {"keep": keep, "dry_run": dry_run}
    return cast(PruneResult, _checkpoints(hub).tool("prune", {"root": root}, options, progress))


@verb("POST /v1/checkpoints/pin", least=Role.MEMBER)
def pin(hub: Hub, path: Ref, remove: RemovePin = False, *, progress: Progress) -> PinResult:
    """Pin a checkpoint, so that it is never deleted as an old one, or remove its pin. Events as for a copy."""
    return cast(PinResult, _checkpoints(hub).tool("pin", {"path": path}, {"remove": remove}, progress))


@verb("POST /v1/checkpoints/import", least=Role.MEMBER)
def import_(
    hub: Hub,
    source: ImportSource,
    root: Root = "",
    format: ImportFormat = "",  # noqa: A002
    step: Step = None,
    drop: Drop = False,
    *,
    progress: Progress,
) -> ImportResult:
    """Import a file or folder of another library as a checkpoint. No code in it is run. Events as for a copy."""
    if not root:
        raise SpecError("root", "is missing", "write POOL:PATH")
    options = {"format": format, "step": step, "drop": drop}
    return cast(ImportResult, _checkpoints(hub).tool("import", {"source": source, "root": root}, options, progress))


@verb("POST /v1/checkpoints/export", least=Role.MEMBER)
def export(
    hub: Hub,
    source: Ref,
    target: ExportTarget,
    format: ExportFormat = "safetensors",  # noqa: A002
    entry: Entry = "",
    *,
    progress: Progress,
) -> ExportResult:
    """Write a checkpoint in the format of another library. Events as for a copy."""
    locations, options = {"source": source, "target": target}, {"format": format, "entry": entry}
    return cast(ExportResult, _checkpoints(hub).tool("export", locations, options, progress))


# -- between a client and a pool


@verb("GET /v1/checkpoints/manifest", least=Role.VIEWER, slow=True)
def read_manifest(hub: Hub, ref: Ref) -> Download:
    """MANIFEST.json of a checkpoint, unchanged. The header Polyfleet-Checkpoint names the checkpoint, for a folder the
    newest in it.
    """
    reply = _checkpoints(hub).manifest(ref)
    return Download(reply["manifest"], {"Polyfleet-Checkpoint": quote(reply["checkpoint"])})


@verb("GET /v1/checkpoints/chunk", least=Role.VIEWER, slow=True)
def read_chunk(hub: Hub, ref: Checkpoint, file: Name, index: Index) -> Download:
    """One chunk of a checkpoint's file, at most 8 MiB."""
    return Download(_checkpoints(hub).chunk(ref, file, index))


@verb("GET /v1/checkpoints/place", least=Role.MEMBER, slow=True)
def destination(hub: Hub, target: str) -> CheckpointDestination:
    """The node that writes POOL:FOLDER."""
    return _checkpoints(hub).destination(target)


@verb("PUT /v1/checkpoints/incoming", least=Role.MEMBER, slow=True, body=MANIFEST_BODY)
def begin_upload(hub: Hub, node: Name, folder: str, name: Name, manifest: bytes) -> IncomingView:
    """Begin to send a checkpoint with this manifest (`application/octet-stream`). The response names the chunks that
    are missing; the others have already arrived.
    """
    return _checkpoints(hub).begin(node, folder, name, manifest)


@verb("PUT /v1/checkpoints/incoming/chunk", least=Role.MEMBER, status=201, slow=True)
def send_chunk(hub: Hub, node: Name, folder: str, name: Name, file: Name, index: Index, data: bytes) -> ChunkView:
    """Send one chunk (`application/octet-stream`). Refused if it does not match the manifest."""
    _checkpoints(hub).write(node, (folder, name), file, index, data)
    return {"file": file, "index": index}


@verb("DELETE /v1/checkpoints/incoming", least=Role.MEMBER, slow=True)
def interrupt_upload(hub: Hub, node: Name, folder: str, name: Name) -> InterruptedView:
    """Interrupt a copy. Chunks that have arrived remain for the next try, which need not wait."""
    _checkpoints(hub).leave(node, folder, name)
    return {"folder": folder, "name": name}


@verb("POST /v1/checkpoints/arrived", least=Role.MEMBER, slow=True)
def commit_upload(hub: Hub, node: Node, folder: Folder, name: StepName) -> CommittedView:
    """Complete a copy: all chunks are read back and verified, then the checkpoint is committed."""
    return _checkpoints(hub).commit(node, folder, name)


def _checkpoints(hub: Hub) -> CheckpointService:
    """Checkpoints of the fleet. Raises FleetError, which names the nodes of their storages, if no fleet is running."""
    readiness = hub.service.readiness
    nodes = "; ".join(f"pool {pool}: {', '.join(names)}" for pool, names in readiness.pools().items())
    readiness.check_served(f"checkpoints are read through its nodes ({nodes})" if nodes else "")
    return hub.service.checkpoint_service
