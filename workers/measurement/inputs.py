"""Inputs of one call of a model, and of repeated calls: a model that overwrites its input gets a copy at each call."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from workers.devices.backends.device_transfer import map_tensors, tensors_of
from workers.measurement.fingerprint import tensor_digest
from workers.measurement.model_state import OPAQUE_TYPES, SCALAR_TYPES


class Sample(NamedTuple):
    """One call's inputs."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def copy(self) -> "Sample":
        """Return a deep copy, since a call may overwrite it. Views of one storage stay views of one storage."""
        memo: dict[int, Any] = {id(t): t.detach().clone() for t in tensors_of(self) if not t.is_leaf}
        try:
            return copy.deepcopy(self, memo)
        except (TypeError, RuntimeError):  # share an object that cannot be copied, but copy the tensors
            return Sample(*map_tensors(tuple(self), lambda t: t.detach().clone()))


def as_sample(value: Any) -> Sample | None:
    """Convert the value of a sample factory: a tuple or list holds positional arguments, a dict keyword arguments; any
    other value is one argument.
    """
    if value is None or isinstance(value, Sample):
        return value
    if isinstance(value, dict):
        return Sample((), value)
    return Sample(tuple(value), {}) if isinstance(value, tuple | list) else Sample((value,), {})


MAX_COPIES = 64
MAX_COPIES_BYTES = 2 << 30


class Inputs:
    """Supply of inputs: `refill` makes copies for the next calls outside the timed part, `next_input` returns one per
    call.

    Nothing is copied for a model that does not change its input.
    """

    def __init__(self, sample: Sample):
        self._sample = sample
        self._size_bytes = sum(t.nbytes for t in tensors_of(sample))
        self._copies: list[Sample] = []
        self._next = 0
        self.changed: tuple[str, ...] = ()

    @property
    def max_calls(self) -> int:
        """Maximum calls per timed part: each needs a copy, and all copies are in the device's memory at once."""
        return max(1, min(MAX_COPIES, MAX_COPIES_BYTES // max(self._size_bytes, 1)))

    def first(self) -> Sample:
        """Return a copy for the first call; `compare` then compares it with the original."""
        self._copies, self._next = [self._sample.copy()], 0
        return self._copies[0]

    def compare(self) -> tuple[str, ...]:
        """Return the names of the inputs that the first call changed."""
        after = digests(self._copies[0])
        self.changed = changed_names(digests(self._sample), after)
        self._copies = []
        return self.changed

    def probe(self, *calls: Callable[[], Any]) -> None:
        """Detect whether one of `calls`, which use `next_input`, changes its inputs. Nothing is timed."""
        changed: list[str] = []
        for call in calls:
            self.changed = ("not compared yet",)
            self.first()
            call()
            changed += self.compare()
        self.changed = tuple(dict.fromkeys(changed))

    def refill(self, calls: int) -> None:
        if self.changed:
            self._copies = []  # freed before new ones are made, because both might not fit
            self._copies, self._next = [self._sample.copy() for _ in range(calls)], 0

    def next_input(self) -> Sample:
        """Return the next input. It is freed only by the next `refill`, because freeing memory also takes time."""
        if not self.changed:
            return self._sample
        self._next += 1
        return self._copies[self._next - 1]


def digests(sample: Sample) -> dict[str, str]:
    """Map names of leaves to digests: `input[0]`, `input[1]['mask']`, `input['labels']` for a keyword argument."""
    named = [*enumerate(sample.args), *sample.kwargs.items()]
    leaves = [leaf for key, value in named for leaf in _leaves(value, f"input[{key!r}]", ())]
    return {name: _digest(leaf) for name, leaf in leaves}


def changed_names(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names whose values differ, were added or were removed, in order."""
    return tuple(name for name in dict.fromkeys((*before, *after)) if before.get(name) != after.get(name))


def _leaves(value: Any, name: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Iterate over values in nested lists, tuples, mappings and plain objects, such as a key-value cache."""
    if isinstance(value, (torch.Tensor, *SCALAR_TYPES, *OPAQUE_TYPES)) or id(value) in above:
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{name}[{key!r}]", (*above, id(value)))
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            yield from _leaves(item, f"{name}[{position}]", (*above, id(value)))
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
    return repr(leaf) if isinstance(leaf, SCALAR_TYPES) else type(leaf).__name__
