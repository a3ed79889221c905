"""What optimisation works on: a model, one call's inputs, the back end, and the words for what was and was not done."""

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from cluster.errors import UserError
from workers.backends.parts.device_transfer import map_tensors, tensors_of
from workers.optimizers.model_state import unchanged
from workers.optimizers.output_difference import Difference, all_tensors, largest_difference

if TYPE_CHECKING:
    from workers.backends.base import BaseBackend


class PreparedModel(NamedTuple):
    """A model ready to use, what was done to it (`name` or `name: detail`), and what was not (name -> reason).

    `folded` are the names of each convolution and of the batch norm that became part of it: see prepared_model.py.
    """

    model: nn.Module
    applied: list[str]
    skipped: dict[str, str]
    folded: tuple[tuple[str, str], ...] = ()


class SkipPass(Exception):
    """Raised by a pass that does not apply; its text is the reason the user reads."""


class Sample(NamedTuple):
    """One call's inputs."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def copy(self) -> "Sample":
        """A deep copy: a call may change it in place. Views of one storage stay views of one."""
        memo: dict[int, Any] = {id(t): t.detach().clone() for t in tensors_of(self) if not t.is_leaf}
        try:
            return copy.deepcopy(self, memo)
        except (TypeError, RuntimeError):  # an object that cannot be copied is shared, the tensors beside it are not
            return Sample(*map_tensors(tuple(self), lambda t: t.detach().clone()))


@dataclass(slots=True)
class PassContext:
    """What a pass may look at. `sample` is one call's inputs on the device, or None.

    `memory_bytes` is what training may take (None: all that is free); `compile_mode` is for torch.compile. `compiled`:
    the caller has wrapped the model in torch.compile. `compiles`: a later pass does. `details` and `folded` are what
    passes tell of what they did.
    """

    backend: "BaseBackend"
    dtype: torch.dtype
    training: bool
    sample: "Sample | None" = None
    memory_bytes: int | None = None
    compile_mode: str = "default"
    details: dict[str, str] = field(default_factory=dict)
    folded: tuple[tuple[str, str], ...] = ()
    compiled: bool = False
    compiles: bool = False

    def learns(self, model: nn.Module) -> bool:
        """Whether what only inference allows would be wrong: the work is training, or the model is in that mode."""
        return self.training or model.training


def as_sample(value: Any) -> Sample | None:
    """What a sample factory returned: a tuple or list is positional arguments, a dict with string keys keyword ones,
    else one argument.
    """
    if value is None or isinstance(value, Sample):
        return value
    if isinstance(value, dict):
        return Sample((), value)
    return Sample(tuple(value), {}) if isinstance(value, tuple | list) else Sample((value,), {})


def outputs(model: nn.Module, sample: Sample) -> list[torch.Tensor]:
    """Every tensor of one call, in eval mode and without gradients, so that looking changes nothing."""
    training, given = model.training, sample.copy()
    model.eval()
    try:
        with torch.no_grad(), unchanged(model):
            return all_tensors(model(*given.args, **given.kwargs))
    finally:
        model.train(training)


def require_close(
    have: list[torch.Tensor], want: list[torch.Tensor], relative: float, absolute: float = 0.0
) -> Difference:
    """Raises Skip when a pass moved an output by more than `relative` of its largest value, and than `absolute`."""
    moved = largest_difference(have, want)
    if not (moved.max_rel <= relative or moved.max_abs <= absolute):
        raise SkipPass(
            f"rolled back: the output moved by {moved.max_rel:.2g} of its largest value, more than {relative:g}"
        )
    return moved


def deep_copy(model: nn.Module) -> nn.Module:
    """A deep copy in the mode of the original. Raises UserError where the model cannot be copied."""
    try:
        return copy.deepcopy(model)
    except (TypeError, RuntimeError) as e:
        raise UserError(
            f"the model cannot be copied: {e}",
            "keep tensors that need gradients out of its attributes; for training, inplace=True moves it itself",
        ) from e
