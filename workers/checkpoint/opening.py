"""A checkpoint to look into: tensors by name, each read and verified when it is asked for."""

import os
from pathlib import Path

import torch

from cluster.errors import NotFound
from workers.checkpoint.inspect import checkpoint_folder
from workers.checkpoint.reader import Reader
from workers.checkpoint.staging import read_tensor
from workers.checkpoint.words import closest


class OpenCheckpoint(Reader):
    """`manifest` says everything about it. To be used in a `with`."""

    def names(self) -> list[str]:
        """Of all tensors, ties included: `entry/name`."""
        return [*self.manifest.tensors]

    def tensor(self, name: str) -> torch.Tensor:
        """A new tensor on the CPU, bit for bit what was saved. Raises NotFound, DamagedCheckpoint naming the chunk."""
        if name not in self.manifest.tensors:
            raise NotFound(f"{self.folder} has no tensor {name!r}", closest(name, self.names()))
        return read_tensor(self, name)


def open_checkpoint(path: str | os.PathLike[str]) -> OpenCheckpoint:
    return OpenCheckpoint(checkpoint_folder(Path(path)))
