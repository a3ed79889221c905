"""Tensors to bytes and back, bit for bit, and how they lay in memory."""

import torch

from workers.checkpoint import xla
from workers.checkpoint.dtypes import DTYPES, dtype_name
from workers.errors import CheckpointError


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"torch {torch.__version__} has no dtype {name}", "use a newer torch, or convert the checkpoint first"
        )
    return dtype


def to_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values on the CPU; those of XLA travel together."""
    moved = {name: tensor.detach() for name, tensor in tensors.items()}
    lazy = [name for name, tensor in moved.items() if tensor.device.type == "xla"]
    if lazy:
        moved.update(zip(lazy, xla.to_cpu([moved[name] for name in lazy]), strict=True))
    return {name: tensor.resolve_conj().resolve_neg().cpu() for name, tensor in moved.items()}


def to_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor in logical order; no copy where it is contiguous."""
    return byte_view(_movable(tensor).contiguous())


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions from outermost to innermost; () in the usual order, and for a tensor with gaps or overlaps."""
    if tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))
    return tuple(order) if tensor.permute(order).is_contiguous() else ()


def lay_out(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """A copy whose dimensions lie in memory as `memory_order` said."""
    back = [order.index(d) for d in range(len(order))]
    return _movable(tensor).permute(order).contiguous().permute(back).view(tensor.dtype)


def copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    """Into a live tensor of the same dtype and shape, on any device; the target keeps its strides."""
    _movable(target).copy_(_movable(source))


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or its bytes where torch cannot even copy the dtype."""
    packed = DTYPES[dtype_name(tensor.dtype)].packed and tensor.element_size() == 1
    return tensor.view(torch.uint8) if packed else tensor
