"""What optimisation passes share: the context of a pass, the prepared model, and the override of a module's forward."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from cluster.errors import UserError
from workers.measurement.inputs import Sample
from workers.measurement.model_state import preserve_state
from workers.measurement.output_difference import Difference, all_tensors, largest_difference

if TYPE_CHECKING:
    from workers.devices.backends.base import BaseBackend

RUN, ORIGINAL = "_polyfleet_run", "_polyfleet_forward_before"


class PreparedModel(NamedTuple):
    """A model ready to use, the passes applied (`name` or `name: detail`) and those skipped (name -> reason).

    `folded` lists the names of each convolution and the batch norm folded into it: see workers/tasks/prepared_model.py.
    """

    model: nn.Module
    applied: list[str]
    skipped: dict[str, str]
    folded: tuple[tuple[str, str], ...] = ()


class SkipPass(Exception):
    """Raised by a pass that does not apply; its text is the reason the user reads."""


@dataclass(slots=True)
class PassContext:
    """What a pass may use. `sample` is one call's inputs on the device, or None.

    `memory_bytes` limits the memory of training (None: all that is free); `compile_mode` is for torch.compile.
    `is_compiled`: the caller has wrapped the model in torch.compile. `will_compile`: a later pass will compile it.
    Passes record their results in `details` and `folded`.
    """

    backend: "BaseBackend"
    dtype: torch.dtype
    training: bool
    sample: Sample | None = None
    memory_bytes: int | None = None
    compile_mode: str = "default"
    details: dict[str, str] = field(default_factory=dict)
    folded: tuple[tuple[str, str], ...] = ()
    is_compiled: bool = False
    will_compile: bool = False

    def is_training(self, model: nn.Module) -> bool:
        """Return whether inference-only changes are wrong: the work is training, or the model is in training mode."""
        return self.training or model.training


def outputs(model: nn.Module, sample: Sample) -> list[torch.Tensor]:
    """Return every output tensor of one call in eval mode without gradients. The model's state is restored."""
    training, inputs = model.training, sample.copy()
    model.eval()
    try:
        with torch.no_grad(), preserve_state(model):
            return all_tensors(model(*inputs.args, **inputs.kwargs))
    finally:
        model.train(training)


def require_close(
    actual: list[torch.Tensor], expected: list[torch.Tensor], relative: float, absolute: float = 0.0
) -> Difference:
    """Raise SkipPass if a pass changed an output by more than `relative` of its largest value, and by > `absolute`."""
    difference = largest_difference(actual, expected)
    if not (difference.max_rel <= relative or difference.max_abs <= absolute):
        raise SkipPass(
            f"rolled back: the output changed by {difference.max_rel:.2g} of its largest value, more than {relative:g}"
        )
    return difference


def deep_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy in the mode of the original. Raises UserError if the model cannot be copied."""
    try:
        return copy.deepcopy(model)
    except (TypeError, RuntimeError) as e:
        raise UserError(
            f"the model cannot be copied: {e}",
            "keep tensors that need gradients out of its attributes, or train the model itself with inplace=True",
        ) from e


def override_forward(module: nn.Module, run: Callable[..., Any]) -> None:
    """Replace the module's forward by `run(call, *args, **kwargs)`, where `call` is the original forward.

    The module's class, names and state dict do not change. `forward` becomes a bound method, which `deepcopy` binds to
    the copy; a closure over the old forward would continue to compute with the old module.
    `deepcopy` must copy `run` correctly: it is a module-level function, or an object that holds no nn.Module.
    """
    restore_forward(module)
    before = module.__dict__.get("forward")
    module.__dict__.update({RUN: run, ORIGINAL: before, "forward": MethodType(forward, module)})


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Forward of an overridden module. Named as what it replaces: pickle stores a bound method by its name."""
    run, before = self.__dict__[RUN], self.__dict__[ORIGINAL]
    return run(before if before is not None else MethodType(type(self).forward, self), *args, **kwargs)


def restore_forward(module: nn.Module) -> None:
    """Undo `override_forward`. Does nothing for a module without one."""
    if module.__dict__.pop(RUN, None) is None:
        return
    del module.__dict__["forward"]
    before = module.__dict__.pop(ORIGINAL)
    if before is not None:
        module.__dict__["forward"] = before
