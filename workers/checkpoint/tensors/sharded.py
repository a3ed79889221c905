"""Tensors that are sharded over ranks: torch's DTensor, as FSDP2 and tensor parallelism use it.

torch.distributed.tensor takes a second to import; if it was not imported yet, nothing is sharded.
"""

import sys
from typing import Any

import torch

from workers.checkpoint.format.boxes import Box
from workers.errors import CheckpointError


def is_sharded(tensor: torch.Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part as a plain tensor sharing its memory; an unsharded tensor itself."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def box_of(tensor: Any) -> Box | None:
    """Box of this rank's part in the global tensor; None if the tensor is not sharded."""
    if not is_sharded(tensor):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError("a tensor holds partial sums", "reduce it before saving: tensor.full_tensor()")
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Box(tuple(start), tuple(shape))


def is_written_here(tensor: Any, name: str) -> bool:
    """Check whether this rank writes its part. One of several replicas does; which one depends on the name, to share
    the work.
    """
    mesh, coordinates = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinates is None:
        return False
    offset = sum(name.encode())
    replicas = (i for i, placement in enumerate(tensor.placements) if placement.is_replicate())
    return all(coordinates[i] == offset % mesh.size(i) for i in replicas)


def mesh_of(tensor: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Sizes and names of the mesh's dimensions."""
    mesh = tensor.device_mesh
    return tuple(mesh.mesh.shape), tuple(mesh.mesh_dim_names or ())


def empty_like(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a new tensor with the same sharding."""
    tensor_like: torch.Tensor = torch.empty_like(tensor, dtype=dtype)
    return tensor_like.detach()
