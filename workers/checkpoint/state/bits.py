"""Tensors as bytes, bit for bit, and how they lay in memory."""

import torch

from workers.errors import CheckpointError


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"torch {torch.__version__} has no dtype {name}", "use a newer torch, or convert the checkpoint first"
        )
    return dtype


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; what is written there is in the tensor."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions from outermost to innermost; () in the usual order, and for a tensor with gaps or overlaps."""
    if tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))
    return tuple(order) if tensor.permute(order).is_contiguous() else ()


def empty(shape: tuple[int, ...], dtype: torch.dtype, order: tuple[int, ...] = ()) -> torch.Tensor:
    """A new CPU tensor whose dimensions lie in memory as `memory_order` said."""
    if not order:
        return torch.empty(shape, dtype=dtype)
    laid = torch.empty(tuple(shape[d] for d in order), dtype=dtype)
    return laid.permute(tuple(order.index(d) for d in range(len(order))))


def storage_of(tensor: torch.Tensor) -> int:
    """Which memory a tensor lies in; 0 where that cannot be told, as on XLA."""
    if tensor.device.type not in ("cpu", "cuda", "xpu") or tensor.is_meta:
        return 0
    return tensor.untyped_storage().data_ptr()


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (storage_of(a) != 0 and storage_of(a) == storage_of(b))


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same size: torch can copy and join these, whatever the dtype was."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    same_size = _INTEGERS.get(plain.element_size())
    return plain if same_size is None or plain.dtype == same_size else plain.view(same_size)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
