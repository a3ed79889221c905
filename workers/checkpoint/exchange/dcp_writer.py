"""DCP's StorageWriter: every rank writes its part as shards, the coordinator commits.

    dcp.save(state, storage_writer=PolyfleetStorageWriter(root, step))
    dcp.load(state, storage_reader=PolyfleetStorageReader(root))

FSDP2 and DTensor states are sharded as their mesh is; any other mesh can load them. Values other than tensors are
stored in the manifest as JSON, so nothing is pickled or unpickled.
"""

import os
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from cluster.serialization import from_plain, to_plain
from workers.checkpoint.disk.commit import write_manifest, writer_lock
from workers.checkpoint.disk.files import Files
from workers.checkpoint.disk.layout import SHARD_BYTES, lay_out
from workers.checkpoint.disk.retention import PART, apply_retention, check_attempt_is_newest, remove_checkpoint
from workers.checkpoint.disk.writer import write_shards
from workers.checkpoint.exchange.dcp_names import STATE, entry_for, stored_name
from workers.checkpoint.format import tree
from workers.checkpoint.format.dtypes import dtype_name
from workers.checkpoint.format.manifest import FileEntry, Manifest, StateEntry, Stored, TensorEntry, World, dump
from workers.checkpoint.saving.saver import producer_of
from workers.checkpoint.state.names import check_plain
from workers.checkpoint.tensors.pieces import pieces
from workers.errors import CheckpointError


class PolyfleetStorageWriter(StorageWriter):
    """Save one checkpoint of `step` below `root`, on a file system that all ranks share. For one `dcp.save`.

    `keep`, `attempt` and `kind` are as for workers.checkpoint.save. `path` is the checkpoint's folder once saved.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        step: int,
        *,
        keep: int | None = None,
        attempt: str | None = None,
        kind: str = "",
    ):
        self._root, self._step, self._keep = Path(root), step, keep
        self._producer = producer_of(attempt, kind)
        self._name = ""
        self._files = Files()
        self._lock = ExitStack()

    @property
    def path(self) -> Path:
        return self._root / self._name

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._root = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the folder is created in prepare_global_plan, after all plans were checked."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            if item.tensor_data is not None and dtype_name(item.tensor_data.properties.dtype).startswith("q"):
                raise CheckpointError(f"{item.index.fqn} is quantized", "save it as plain tensors")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._name = f"step-{self._step:08d}-{os.urandom(4).hex()}"
        self._lock.enter_context(writer_lock(self._root))
        check_attempt_is_newest(self._root, self._producer)
        self._files.make_folder(self._root / f"{PART}{self._name}")
        return [replace(plan, storage_data=(self._name, rank, len(plans))) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        self._name, rank, _ = plan.storage_data
        tensors, values = {}, {}
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                value = planner.lookup_object(item.index)  # type: ignore[attr-defined]
                values[item.index.fqn] = tree.encode(value, item.index.fqn, tree.raise_unsupported)
            else:
                tensor = _tensor(planner, item)
                check_plain(item.index.fqn, tensor)
                tensors[_key(item)] = tensor
        layouts = lay_out(pieces(tensors), SHARD_BYTES, f"shard-r{rank:05d}-{{:05d}}.safetensors")
        shards = write_shards(self._files, self._root / f"{PART}{self._name}", layouts)
        locations = {
            piece.key: (layout.file, offset)
            for layout in layouts
            for piece, offset in zip(layout.pieces, layout.offsets, strict=True)
        }
        files = {name: to_plain(entry) for name, entry in shards.items()}
        done: Future[list[WriteResult]] = Future()
        done.set_result([_result(item, locations, values, files, tensors) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint, on the coordinator, after every rank has written."""
        staging = self._root / f"{PART}{self._name}"
        try:
            manifest = self._manifest(metadata, [result for rank in results for result in rank], len(results))
            self._files.sync_folder(staging)
            self._files.rename(staging, self.path)
            self._files.sync_folder(self._root)
            write_manifest(self._files, self.path, dump(manifest))
        except BaseException:
            for folder in (staging, self.path):
                with suppress(OSError):
                    remove_checkpoint(self._files, folder)
            raise
        finally:
            self._lock.close()
        if self._keep is not None:
            with writer_lock(self._root):
                apply_retention(self._files, self._root, self._keep, self.path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in str(checkpoint_id)

    def _manifest(self, metadata: Metadata, results: list[WriteResult], ranks: int) -> Manifest:
        paths = metadata.planner_data or {}
        names = {fqn: tuple(paths.get(fqn, (fqn,))) for fqn in metadata.state_dict_metadata}
        is_nested = all(len(path) > 1 for path in names.values())
        stored: dict[str, list[Stored]] = {}
        values: dict[str, Any] = {}
        files: dict[str, Any] = {}
        devices: dict[str, str] = {}
        for result in results:
            data = result.storage_data
            files |= data["files"]
            if "value" in data:
                values[result.index.fqn] = data["value"]
            else:
                stored.setdefault(result.index.fqn, []).append(Stored(**data["stored"]))
                devices[result.index.fqn] = data["device"]
        tensors: dict[str, TensorEntry] = {}
        trees: dict[str, dict[Any, Any]] = {}
        for fqn, path in names.items():
            leaf = values.get(fqn)
            if fqn in stored:
                name, meta = stored_name(path, is_nested), metadata.state_dict_metadata[fqn]
                tensors[name] = TensorEntry(
                    role="tensor",
                    dtype=dtype_name(meta.properties.dtype),  # type: ignore[union-attr]
                    shape=tuple(meta.size),  # type: ignore[union-attr]
                    shards=tuple(stored[fqn]),
                    device=devices[fqn],
                )
                leaf = {"$tensor": name}
            entry = entry_for(path, is_nested)
            _put(trees.setdefault(entry, {}), path[1:] if entry == path[0] and is_nested else path, leaf)
        entries = {
            name: StateEntry("tree", STATE if name == STATE and not is_nested else "", _restore_lists(value))
            for name, value in trees.items()
        }
        created = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        return Manifest(
            self._step, created, self._producer, from_plain(dict[str, FileEntry], files), tensors, entries, World(ranks)
        )


def _tensor(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    tensor: Any = planner.resolve_data(item)
    return tensor.detach()  # type: ignore[no-any-return]


def _key(item: WriteItem) -> str:
    """Name of an item, unique in a rank's files, which may contain several parts of one tensor."""
    offset = item.index.offset
    return item.index.fqn if not offset or not any(offset) else f"{item.index.fqn}@{','.join(map(str, offset))}"


def _result(
    item: WriteItem,
    locations: dict[str, tuple[str, int]],
    values: dict[str, Any],
    files: dict[str, Any],
    tensors: dict[str, torch.Tensor],
) -> WriteResult:
    """What the coordinator needs to know of an item, as plain data, because it is sent between ranks."""
    fqn = item.index.fqn
    if item.type == WriteItemType.BYTE_IO:
        return WriteResult(item.index, 0, {"files": files, "value": values[fqn]})
    key, data = _key(item), item.tensor_data
    assert data is not None
    file, offset = locations[key]
    is_part = tuple(data.chunk.sizes) != tuple(data.size)
    stored = {"file": file, "offset": offset}
    stored |= {"start": tuple(data.chunk.offsets), "shape": tuple(data.chunk.sizes)} if is_part else {}
    written = {"files": files, "stored": stored, "device": str(tensors[key].device)}
    return WriteResult(item.index, tensors[key].nbytes, written)


def _put(tree: dict[Any, Any], path: tuple[Any, ...], leaf: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def _restore_lists(tree: Any) -> Any:
    """Turn dicts with the keys 0, 1, 2, … back into lists; encode other non-string keys as `$dict`."""
    if not isinstance(tree, dict) or (tree and str(next(iter(tree))).startswith("$")):
        return tree
    if tree and all(type(key) is int for key in tree) and sorted(tree) == list(range(len(tree))):
        return [_restore_lists(tree[i]) for i in sorted(tree)]
    if all(isinstance(key, str) for key in tree):
        return {key: _restore_lists(value) for key, value in tree.items()}
    return {"$dict": [[key, _restore_lists(value)] for key, value in tree.items()]}
