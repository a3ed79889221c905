"""Inputs of one call of a model."""

import copy
from typing import Any, NamedTuple

from workers.devices.backends.device_transfer import map_tensors, tensors_of


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
