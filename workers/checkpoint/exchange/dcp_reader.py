"""DCP's StorageReader for Polyfleet checkpoints: each rank reads and verifies only what it requests."""

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from cluster.errors import NotFound
from workers.checkpoint.conversion import bits
from workers.checkpoint.conversion.convert import check_convertible
from workers.checkpoint.disk.inspect import latest
from workers.checkpoint.disk.reader import CheckpointReader as Verified
from workers.checkpoint.exchange.dcp_names import tensors_of, values_of
from workers.checkpoint.format import tree
from workers.checkpoint.format.boxes import Box, full_box
from workers.checkpoint.format.manifest import NAME, TensorEntry
from workers.checkpoint.format.manifest_checks import stored_box
from workers.checkpoint.tensors.tensor_fill import TensorFill, dry_run, fill
from workers.errors import CheckpointError


class PolyfleetStorageReader(StorageReader):
    """Load the checkpoint at a path, or the newest sound one below a root.
    A state dict with another dtype gets converted values; `on_lossy="error"` (default) raises before anything is
    written if a value would change.
    """

    def __init__(self, root_or_path: str | os.PathLike[str], *, on_lossy: str = "error"):
        self._path = Path(root_or_path)
        self._on_lossy = on_lossy
        self._reader: Verified | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id)
        self._reader = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        manifest = self._open_reader().manifest
        self._names, self._values = tensors_of(manifest), values_of(manifest)
        tensor_metadata: dict[str, Any] = {
            dotted: _metadata(self._open_reader().entry(name)) for dotted, name in self._names.items()
        }
        tensor_metadata |= {dotted: BytesStorageMetadata() for dotted in self._values}
        return Metadata(state_dict_metadata=tensor_metadata)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: all that is needed was read with the metadata."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        reader = self._open_reader()
        fills: list[tuple[ReadItem, TensorFill]] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                _set(planner, item, tree.decode(self._values[item.storage_index.fqn], tree.raise_unsupported))
            else:
                fills.append((item, self._fill(planner, item)))
        work = [tensor_fill for _, tensor_fill in fills]
        reader.verify_chunks(chunk for tensor_fill in work for chunk in reader.chunks_of(tensor_fill.name))
        if self._on_lossy == "error":
            _raise_if_lossy(dry_run(reader, work))
        with torch.no_grad():
            fill(reader, work)
        for item, tensor_fill in fills:
            planner.commit_tensor(item, tensor_fill.target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()

    def _open_reader(self) -> Verified:
        if self._reader is None:
            self._reader = Verified(self._find_checkpoint(), follow=True)
        return self._reader

    def _find_checkpoint(self) -> Path:
        if os.path.lexists(self._path / NAME):
            return self._path
        newest = latest(self._path)
        if newest is None:
            raise NotFound(f"no checkpoint in {self._path}", "save one first, or name another folder")
        return newest.path

    def _fill(self, planner: LoadPlanner, item: ReadItem) -> TensorFill:
        name = self._names[item.storage_index.fqn]
        target = planner.resolve_tensor(item).detach()
        check_convertible(name, bits.torch_dtype(self._open_reader().entry(name).dtype), target.dtype)
        base = item.storage_index.offset or (0,) * len(item.lengths)
        start = tuple(a + b for a, b in zip(base, item.storage_offsets, strict=True))
        return TensorFill(self._open_reader().manifest.resolve(name), target, Box(start, tuple(item.lengths)))


def _metadata(entry: TensorEntry) -> TensorStorageMetadata:
    boxes = [full_box(entry.shape)] if entry.view else [stored_box(entry, stored) for stored in entry.shards]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=bits.torch_dtype(entry.dtype)),
        size=torch.Size(entry.shape),
        chunks=[ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape)) for box in boxes],
    )


def _set(planner: LoadPlanner, item: ReadItem, value: Any) -> None:
    """Set a value in the planner's state dict like DefaultLoadPlanner.load_bytes, without unpickling."""
    fqn, attributes = item.dest_index.fqn, vars(planner)
    if "state_dict" not in attributes:
        raise CheckpointError(
            f"{type(planner).__name__} cannot load {fqn}, which is not a tensor", "derive it from DefaultLoadPlanner"
        )
    if attributes.get("flatten_state_dict"):
        set_element(attributes["original_state_dict"], attributes["mappings"][fqn], value)
    else:
        attributes["state_dict"][fqn] = value


def _raise_if_lossy(changes: dict[str, Any]) -> None:
    lossy = {name: change for name, change in changes.items() if change.values_changed}
    for name, change in lossy.items():
        raise CheckpointError(
            f"{name}: {change.values_changed} values would change, by at most {change.max_abs_error:.3g}"
            f" ({len(lossy)} tensors are affected)",
            'load it in the dtype it was saved in, or pass on_lossy="allow"',
        )
