"""Save and restore a model's state besides its parameters, which a forward may change.

That is buffers, and attributes that are tensors, numbers or strings. Contents of lists or objects are not restored.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from workers.measurement.fingerprint import tensor_digest

OPAQUE_TYPES = (nn.Module, type)
SCALAR_TYPES = (int, float, complex, str, bytes, type(None))
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
MAX_NESTING = 4


class StateSnapshot:
    """Snapshot of the buffers or attributes of one module. Tensors are copied to the host."""

    def __init__(self, values: dict[str, Any]):
        self._values, self._names = values, {*values, *MODULE_ATTRIBUTES}
        self._before = {
            name: value
            for name, value in values.items()
            if name not in MODULE_ATTRIBUTES and isinstance(value, (Tensor, *SCALAR_TYPES))
        }
        tensors = [value for value in self._before.values() if isinstance(value, Tensor) and _has_own_bits(value)]
        self._contents = [(tensor, tensor.detach().cpu().clone(), tensor_digest(tensor)) for tensor in tensors]

    def restore(self) -> None:
        """Restore every value, and remove tensors that were added since the snapshot."""
        new = [name for name, value in self._values.items() if name not in self._names and has_tensors(value)]
        for name in new:
            del self._values[name]
        self._values.update(self._before)
        self._restore_contents()

    def restore_changed(self) -> None:
        """Restore every value that was not None. Tensors added since then, such as a computed table, stay."""
        self._values.update({name: value for name, value in self._before.items() if value is not None})
        self._restore_contents()

    def _restore_contents(self) -> None:
        with torch.no_grad():
            for tensor, content, digest in self._contents:
                if tensor_digest(tensor) != digest:  # an unneeded copy would cost a transfer
                    tensor.copy_(content)


def snapshots(model: nn.Module) -> list[StateSnapshot]:
    return [StateSnapshot(values) for module in model.modules() for values in (module._buffers, vars(module))]


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Restore the state of `model` at the end, so that trial calls advance no cache or counter.

    A model with lazy modules keeps what its first call initializes.
    """
    before = [] if any(map(is_lazy, (*model.parameters(), *model.buffers()))) else snapshots(model)
    try:
        yield
    finally:
        for table in before:
            table.restore_changed()


def has_tensors(value: Any) -> bool:
    return next(tensors_in(value), None) is not None


def tensors_in(value: Any, nesting: int = MAX_NESTING) -> Iterator[Tensor]:
    """Iterate over tensors in nested lists, tuples, mappings and plain objects, such as a key-value cache."""
    if isinstance(value, Tensor):
        yield value
    if nesting == 0 or isinstance(value, (Tensor, *SCALAR_TYPES, *OPAQUE_TYPES)):
        return
    if isinstance(value, Mapping):
        inner: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    else:
        inner = () if callable(value) else getattr(value, "__dict__", {}).values()
    for item in inner:
        yield from tensors_in(item, nesting - 1)


def _has_own_bits(tensor: Tensor) -> bool:
    """Return whether `tensor` can be written: it has memory, and its elements do not share it."""
    return not tensor.is_meta and tensor.layout == torch.strided and (0 not in tensor.stride() or tensor.numel() <= 1)
