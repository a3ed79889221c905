"""Checkpoints in the storages of pools, and their transfer. Results of tools: checkpoint_results."""

from typing import Literal

from typing_extensions import TypedDict


class ProducerView(TypedDict):
    """Who saved a checkpoint."""

    polyfleet: str
    """Version of Polyfleet."""
    torch: str
    backend: str
    kind: str
    """Kind of device."""
    job: str
    epoch: int
    """Number of the attempt."""


class EntryView(TypedDict):
    """One entry of a saved state, such as a model or an optimizer."""

    kind: str
    type: str
    """Its class, if it has one."""


class DtypeView(TypedDict):
    """Tensors of one dtype."""

    tensors: int
    bytes: int


class CheckpointContents(TypedDict, total=False):
    """What a checkpoint contains, by its manifest. Absent in a list for a checkpoint whose manifest is invalid."""

    files: int
    world: int
    """Number of ranks that saved it together."""
    pinned: bool
    """Whether it is never deleted by `keep` or `prune`."""
    damaged: str
    """Why it is marked as damaged, or empty."""
    entries: dict[str, EntryView]
    tensors: int
    parameters: int
    """Number of the values of all parameters."""
    dtypes: dict[str, DtypeView]
    roles: dict[str, int]
    """Number of tensors by role, such as parameter."""
    ties: dict[str, str]
    """Tensors that share the data of another one."""


class CheckpointReference(TypedDict):
    """Where a checkpoint is."""

    pool: str
    """Empty for one in an object store."""
    path: str
    """Path in the pool's storage, or the URI in an object store."""
    ref: str
    """POOL:PATH or the URI, as requests name the checkpoint."""


class CheckpointIdentity(CheckpointReference, CheckpointContents):
    """A checkpoint in a pool's storage."""

    name: str
    step: int
    created: str
    """ISO 8601 in UTC; empty if its manifest is invalid."""
    producer: ProducerView
    bytes: int


class CheckpointSummary(CheckpointIdentity):
    """A checkpoint in a list."""

    problem: str
    """Why it cannot be loaded, or empty."""
    nodes: list[str]
    """One node for each storage of the pool that has it."""


class PassedOver(TypedDict):
    """A newer checkpoint that is damaged."""

    path: str
    reason: str


class CheckpointView(CheckpointIdentity):
    """A checkpoint with its contents."""

    passed_over: list[PassedOver]
    """Newer checkpoints of the folder that was named, which are damaged."""


class MoveSource(TypedDict):
    """Where a checkpoint was saved."""

    backend: str
    kind: str
    world: int


class MoveTarget(TypedDict):
    """Devices for which a load is planned."""

    backend: str
    kind: str
    count: int


class MoveDtype(TypedDict):
    """What a load does with the tensors of one dtype."""

    dtype: str
    tensors: int
    bytes: int
    action: Literal["keep", "convert", "refuse"]
    to: str
    may_lose: bool
    """Whether values can change."""
    reason: str
    example: str
    """Name of one of the tensors."""


class MoveMemory(TypedDict):
    """Whether a checkpoint fits."""

    needed_bytes: int
    device_bytes: int | None
    """Memory of one device, if the catalogue has it."""
    fits: Literal["replicated", "sharded", "no", "unknown"]
    """`replicated`: each device can hold everything; `sharded`: only all of them together."""


MoveReshard = TypedDict("MoveReshard", {"from": int, "mesh": list[int], "to": int, "tensors_cut": int})
"""How the number of ranks changes: `from` ranks, arranged as `mesh`, `to` devices; `tensors_cut` tensors were saved in
several parts.
"""


class MovePlan(TypedDict):
    """What devices of another kind would keep, convert or refuse, and whether the checkpoint fits."""

    step: int
    source: MoveSource
    target: MoveTarget
    bytes: int
    ok: bool
    dtypes: list[MoveDtype]
    memory: MoveMemory
    reshard: MoveReshard
    random: dict[str, str]
    """`continued` or what happens instead, for each stream of random numbers."""
    cannot_follow: list[str]
    """A sentence for each thing that is lost."""


class CheckpointDestination(TypedDict):
    """The node that writes to a folder of a pool."""

    node: str
    pool: str
    folder: str


class ChunkView(TypedDict):
    """A chunk of a file of a checkpoint."""

    file: str
    index: int


class IncomingView(TypedDict):
    """A checkpoint whose transfer to a pool has started."""

    arrived: bool
    """Whether it is already there, complete."""
    missing: list[ChunkView]
    """The chunks to send."""
    step: int
    files: int
    bytes: int


class InterruptedView(TypedDict):
    """A transfer that was interrupted."""

    folder: str
    name: str


class CommittedView(CheckpointReference):
    """A transfer that is complete."""
