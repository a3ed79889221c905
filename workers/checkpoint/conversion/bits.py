"""Tensors as bytes, bit for bit, and their order in memory."""

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
    """Return the memory of a contiguous CPU tensor; writes to it change the tensor."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dimensions, outermost first; () for the usual order, and for a tensor with gaps or overlaps."""
    if tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))
    return tuple(order) if tensor.permute(order).is_contiguous() else ()


def empty(shape: tuple[int, ...], dtype: torch.dtype, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Return a new CPU tensor with the memory order that `memory_order` returned."""
    if not order:
        return torch.empty(shape, dtype=dtype)
    memory = torch.empty(tuple(shape[d] for d in order), dtype=dtype)
    return memory.permute(tuple(order.index(d) for d in range(len(order))))


def storage_of(tensor: torch.Tensor) -> int:
    """Address of a tensor's memory; 0 if it is unknown, as on XLA."""
    if tensor.device.type not in ("cpu", "cuda", "xpu") or tensor.is_meta:
        return 0
    return tensor.untyped_storage().data_ptr()


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (storage_of(a) != 0 and storage_of(a) == storage_of(b))


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """View the memory as integers of the same size, which torch can copy and concatenate for any dtype."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    same_size = _INTEGERS.get(plain.element_size())
    return plain if same_size is None or plain.dtype == same_size else plain.view(same_size)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
