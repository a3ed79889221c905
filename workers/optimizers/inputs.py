"""Inputs of repeated calls. A model that changes its input in place gets each call's input as the first call had it."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from workers.backends.parts.device_transfer import tensors_of
from workers.optimizers.fingerprint import tensor_digest
from workers.optimizers.model_state import OPAQUE, PLAIN
from workers.optimizers.pass_context import Sample

MAX_COPIES = 64
MAX_COPIES_BYTES = 2 << 30


class Inputs:
    """`refill` makes the copies that the next calls take, outside the time that is measured; each call takes one with
    `take`. Nothing is copied for a model that leaves its input alone.
    """

    def __init__(self, sample: Sample):
        self._sample = sample
        self._size_bytes = sum(t.nbytes for t in tensors_of(sample))
        self._copies: list[Sample] = []
        self._next = 0
        self.changed: tuple[str, ...] = ()

    @property
    def max_calls(self) -> int:
        """Calls of one part: each needs a copy, and all copies lie in the device's memory at once."""
        return max(1, min(MAX_COPIES, MAX_COPIES_BYTES // max(self._size_bytes, 1)))

    def first(self) -> Sample:
        """A copy for the first call, which `compare` then compares with what was given."""
        self._copies, self._next = [self._sample.copy()], 0
        return self._copies[0]

    def compare(self) -> tuple[str, ...]:
        """Names of what the first call changed in its input."""
        have = digests(self._copies[0])
        self.changed = changed_names(digests(self._sample), have)
        self._copies = []
        return self.changed

    def probe(self, call: Callable[[], Any]) -> None:
        """Finds out whether `call`, which uses `take`, changes its inputs. Nothing is timed."""
        self.changed = ("not known yet",)
        self.first()
        call()
        self.compare()

    def refill(self, calls: int) -> None:
        if self.changed:
            self._copies = []  # before the new ones are made: both would not fit
            self._copies, self._next = [self._sample.copy() for _ in range(calls)], 0

    def take(self) -> Sample:
        """What was taken is kept until the next `refill`: freeing memory takes time, too."""
        if not self.changed:
            return self._sample
        self._next += 1
        return self._copies[self._next - 1]


def digests(sample: Sample) -> dict[str, str]:
    """A digest of each leaf by its name: `input[0]`, `input[1]['mask']`, `input['labels']` for a keyword argument."""
    named = [*enumerate(sample.args), *sample.kwargs.items()]
    found = [leaf for key, value in named for leaf in _leaves(value, f"input[{key!r}]", ())]
    return {name: _digest(leaf) for name, leaf in found}


def changed_names(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, ...]:
    """What differs, is new, or is gone, in order."""
    return tuple(name for name in dict.fromkeys((*before, *after)) if before.get(name) != after.get(name))


def _leaves(value: Any, name: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Values in nested lists, tuples, mappings and plain objects, such as a cache of keys and values."""
    if isinstance(value, (torch.Tensor, *PLAIN, *OPAQUE)) or id(value) in above:
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{name}[{key!r}]", (*above, id(value)))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _leaves(item, f"{name}[{place}]", (*above, id(value)))
    elif hasattr(value, "__dict__") and not callable(value):
        for key, item in vars(value).items():
            yield from _leaves(item, f"{name}.{key}", (*above, id(value)))
    else:
        yield name, value


def _digest(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return tensor_digest(leaf)
    if type(leaf).__module__ == "numpy" and hasattr(leaf, "tobytes"):
        return tensor_digest(torch.as_tensor(leaf)) if leaf.dtype.kind in "biuf" else leaf.tobytes().hex()
    return repr(leaf) if isinstance(leaf, PLAIN) else type(leaf).__name__
