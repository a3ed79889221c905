"""Count the live bytes while torch computes on fake tensors."""

import weakref
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count every storage an operation returns while this mode is entered, until torch frees it.

    Storages of fake tensors have no address, so they are distinguished by identity; a view adds nothing. Memory that a
    kernel allocates and frees inside one operation is not counted: no Python code runs there.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._finalizers: dict[int, weakref.finalize[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.watch(result)
        return result

    def watch(self, value: Any) -> int:
        """Count the storages of the tensors in `value` that are not counted yet. Return their bytes."""
        return sum(self._add(t.untyped_storage()) for t in tree_leaves(value) if isinstance(t, torch.Tensor))

    def __enter__(self) -> Self:
        """Restart `peak` from the bytes that are live now."""
        self.peak = self.now
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def _add(self, storage: torch.UntypedStorage) -> int:
        key = id(storage)
        if key in self._finalizers:
            return 0
        size = storage.nbytes()
        self._finalizers[key] = weakref.finalize(storage, self._drop, key, size)
        self.now += size
        self.peak = max(self.peak, self.now)
        return size

    def _drop(self, key: int, size: int) -> None:
        del self._finalizers[key]
        self.now -= size
