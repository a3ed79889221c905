"""Results of copies of checkpoints and of tools on them. Locations are POOL:PATH or URIs."""

from typing import NotRequired

from typing_extensions import TypedDict

from orchestrator.views.checkpoints import CheckpointReference


class LossView(TypedDict):
    """How a conversion changed the values of a tensor."""

    values_changed: int
    new_inf: int
    new_nan: int
    max_abs_error: float
    max_rel_error: float


class ConvertedTensor(TypedDict):
    """A tensor that was converted."""

    bytes: int
    stored_dtype: str
    dtype: str
    device: str
    change: LossView


class ConversionResult(CheckpointReference):
    """A converted copy of a checkpoint."""

    step: int
    bytes: int
    already_there: bool
    """Whether the same conversion was made before."""
    kept: int
    """Number of tensors that were not converted."""
    converted: dict[str, ConvertedTensor]
    lossy: int
    """Number of tensors of which values changed."""
    notes: list[str]
    dtypes: list[str]


class CopyResult(TypedDict):
    """A copy of a checkpoint."""

    source: str
    target: str
    step: int
    files: int
    bytes: int
    transferred_bytes: int
    """Bytes that the target did not have."""
    already_there: bool
    verified: bool
    seconds: float
    conversion: NotRequired[ConversionResult]
    """Present if the copy was converted."""


class VerifyResult(CheckpointReference):
    """Result of reading every byte of a checkpoint."""

    step: int
    ok: bool
    bytes: int
    chunks: int
    problems: list[str]


class TensorDifference(TypedDict):
    """A tensor that differs between two checkpoints. Differences of values are absent if they cannot be compared."""

    name: str
    dtype: str
    shape: list[int]
    dtype_b: NotRequired[str]
    """dtype in the second checkpoint, present if dtype or shape differ."""
    shape_b: NotRequired[list[int]]
    changed: NotRequired[int]
    """Number of values that differ."""
    max_abs: NotRequired[float]
    max_rel: NotRequired[float]
    max_ulp: NotRequired[int]
    """Greatest distance, in representable values of the dtype."""


class DiffResult(TypedDict):
    """Differences between two checkpoints."""

    a: str
    b: str
    same: bool
    equal: int
    """Number of equal tensors."""
    tensors: list[TensorDifference]
    only_in_a: list[str]
    only_in_b: list[str]
    entries: list[str]
    """Entries whose structure differs."""
    names: list[str]
    """A sentence for each module of which names were compared without wrappers."""


class PruneResult(TypedDict):
    """Checkpoints that were deleted, or would be."""

    root: str
    kept: list[str]
    deleted: list[str]
    bytes: int
    dry_run: bool


class PinResult(CheckpointReference):
    """A checkpoint that was pinned or is no longer."""

    pinned: bool


class LeftOut(TypedDict):
    """A part of a file that was not imported."""

    name: str
    reason: str


class ImportResult(CheckpointReference):
    """A checkpoint made from a file or folder of another library."""

    format: str
    step: int
    tensors: int
    bytes: int
    copied_bytes: int
    """Less than `bytes` if files were hard-linked."""
    entries: dict[str, str]
    """Kind of each entry."""
    notes: list[str]
    left_out: list[LeftOut]


class ExportResult(CheckpointReference):
    """Files written for another library."""

    format: str
    tensors: int
    files: list[str]
    notes: list[str]
