"""Open a checkpoint to read single tensors or slices; tensors are mapped from the file where possible."""

import mmap
import os
from pathlib import Path
from typing import Any

import torch

from cluster.errors import NotFound
from workers.checkpoint.conversion import bits
from workers.checkpoint.disk.inspect import checkpoint_folder
from workers.checkpoint.disk.reader import CheckpointReader
from workers.checkpoint.format.boxes import Box, full_box, parse_box
from workers.checkpoint.format.manifest import Stored, TensorEntry
from workers.checkpoint.format.manifest_checks import box_bytes
from workers.checkpoint.format.message_text import closest
from workers.checkpoint.tensors.tensor_fill import TensorFill, fill, read_new
from workers.errors import CheckpointError


class OpenCheckpoint(CheckpointReader):
    """An open checkpoint, for use in a `with`; `manifest` describes it. Tensors it returned stay valid afterwards."""

    def __init__(self, folder: Path, verify: bool = True, follow: bool = False):
        super().__init__(folder, follow)
        self._verify = verify
        self._maps: dict[str, mmap.mmap] = {}

    def names(self) -> list[str]:
        """Names of all tensors, ties included, as `entry/name`."""
        return [*self.manifest.tensors]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entry(self._check_name(name)).shape

    def tensor(self, name: str, index: Any = ...) -> torch.Tensor:
        """Return a tensor on the CPU, bit for bit as it was saved. `index`, a tuple of slices, selects a part.

        A full tensor is mapped: no byte is copied, pages are read from the file on first access, and writes to it stay
        in this process. A part, or a tensor stored in several shards, is read into new memory, only the rows it needs.
        Raises NotFound, DamagedCheckpoint naming the chunk, and CheckpointError for an index that does not fit.
        """
        entry = self.entry(self._check_name(name))
        box = self._box(name, entry, index)
        if self._verify:
            self.verify_chunks(self.chunks_of(entry.alias_of if entry.view else name))
        if entry.view is None and box == full_box(entry.shape):
            mapped = self._map_tensor(entry)
            return mapped if mapped is not None else read_new(self, name)
        part = torch.empty(box.shape, dtype=bits.torch_dtype(entry.dtype))
        fill(self, [TensorFill(self.manifest.resolve(name), part, box)])
        return part

    def _box(self, name: str, entry: TensorEntry, index: Any) -> Box:
        try:
            return parse_box(index, entry.shape)
        except (ValueError, IndexError) as e:
            raise CheckpointError(
                f"{name} has the shape {list(entry.shape)}: {e}", "give ranges with step 1, such as [:8]"
            ) from e

    def _map_tensor(self, entry: TensorEntry) -> torch.Tensor | None:
        """Map the tensor from its file, or return None if its bytes are not contiguous, in order and aligned."""
        stored, dtype = entry.shards[0], bits.torch_dtype(entry.dtype)
        size_bytes = box_bytes(entry, stored)
        if len(entry.shards) > 1 or entry.layout or stored.offset % dtype.itemsize or not size_bytes:
            return None
        return self._bytes(stored, size_bytes).view(dtype).view(entry.shape)

    def _bytes(self, stored: Stored, size_bytes: int) -> torch.Tensor:
        if stored.file not in self._maps:
            self._maps[stored.file] = mmap.mmap(self.descriptor(stored.file), 0, flags=mmap.MAP_PRIVATE)
        return torch.frombuffer(self._maps[stored.file], dtype=torch.uint8, count=size_bytes, offset=stored.offset)

    def _check_name(self, name: str) -> str:
        if name not in self.manifest.tensors:
            raise NotFound(f"{self.folder} has no tensor {name!r}", closest(name, self.names()))
        return name


def open_checkpoint(
    path: str | os.PathLike[str], *, verify: str = "chunks", follow_links: bool = True
) -> OpenCheckpoint:
    """Open a checkpoint to read its tensors lazily.
    `verify`: "chunks" verifies the chunks of a tensor when it is first read, "full" verifies all of them now, "none"
    verifies nothing and is as fast as mapping a file. `follow_links`: its files may be links.
    """
    if verify not in ("chunks", "full", "none"):
        raise CheckpointError(f"verify is {verify!r}", "use one of chunks, full, none")
    checkpoint = OpenCheckpoint(checkpoint_folder(Path(path), follow_links), verify != "none", follow_links)
    if verify == "full":
        checkpoint.verify_chunks(checkpoint.all_chunks())
    return checkpoint
