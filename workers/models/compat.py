"""Preparation of models under the names that other libraries use, as functions over a back end.

Users call them as methods: `backend.prepare_model(model)`. See workers/devices/backends/user_methods.py.

A `dtype` or level of None means those of the back end's configuration, or, for a model that was prepared before, those
it was prepared with. `optimization_level` is another name of `level`. `sample_input` is a tensor, a tuple of arguments
or a dict of keyword arguments; with it, the result of each pass is checked. `backend.report` contains what the last
call applied, and what it skipped for which reason.
"""

from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from cluster.errors import UserError
from workers.devices.backends.user_methods import overridable
from workers.models.optimizers import custom_kernels, preparation
from workers.models.optimizers.preparation import Dtype, Level, PreparedTraining
from workers.models.passes.pass_context import PreparedModel

if TYPE_CHECKING:
    from workers.devices.backends.base import BaseBackend


@overridable
def prepare_model(
    backend: "BaseBackend",
    model: nn.Module,
    level: Level = None,
    sample_input: Any = None,
    dtype: Dtype = None,
    *,
    optimization_level: Level = None,
) -> nn.Module:
    """Return a copy of `model` on the device, optimised up to `level`. The caller's model is not changed.

    If the model is in training mode, so is the copy, and passes for inference only are skipped with that reason.
    Raises UserError if `model` is not a Module, the level is unknown, or the device has no units for the dtype.
    """
    return prepare(backend, model, level, sample_input, dtype, optimization_level=optimization_level).model


@overridable
def optimize_for_inference(
    backend: "BaseBackend", model: nn.Module, sample_input: Any = None, dtype: Dtype = None
) -> nn.Module:
    """Prepare a copy of the model in eval mode at level O2: all passes that are checked and do not search."""
    return preparation.prepare(backend, model, "O2", sample_input, dtype, inference=True).model


@overridable
def prepare_model_with_custom_kernels(
    backend: "BaseBackend", model: nn.Module, sample_input: Any = None, dtype: Dtype = None
) -> nn.Module:
    """Return a copy of `model` on the device, with custom kernels where they are measured to be faster.

    The kernels are compared with the model's own modules in a call with `sample_input`. `report` lists those used,
    and why others were not. See workers/models/optimizers/custom_kernels.py.
    """
    return custom_kernels.prepare_model_with_custom_kernels(backend, model, sample_input, dtype).model


@overridable
def prepare(
    backend: "BaseBackend",
    model: nn.Module,
    level: Level = None,
    sample_input: Any = None,
    dtype: Dtype = None,
    *,
    optimization_level: Level = None,
) -> PreparedModel:
    """Like `prepare_model`, but return the model with its report."""
    return preparation.prepare(backend, model, _one_of(level, optimization_level), sample_input, dtype)


@overload
def optimize_for_training(
    backend: "BaseBackend",
    model: nn.Module,
    optimizer: None = None,
    dtype: Dtype = None,
    level: Level = None,
    sample_input: Any = None,
    inplace: bool = False,
    *,
    optimization_level: Level = None,
) -> nn.Module: ...


@overload
def optimize_for_training(
    backend: "BaseBackend",
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dtype: Dtype = None,
    level: Level = None,
    sample_input: Any = None,
    inplace: bool = False,
    *,
    optimization_level: Level = None,
) -> tuple[nn.Module, torch.optim.Optimizer]: ...


@overridable
def optimize_for_training(
    backend: "BaseBackend",
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    dtype: Dtype = None,
    level: Level = None,
    sample_input: Any = None,
    inplace: bool = False,
    *,
    optimization_level: Level = None,
) -> nn.Module | tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model on the device, a copy unless `inplace`, and the optimizer, now bound to it.

    The optimizer may have been built from the model, or from the one it was prepared from. It remains the same
    object, so that schedulers which refer to it keep working. Raises UserError for an optimizer of another model.
    """
    chosen_level = _one_of(level, optimization_level)
    result = prepare_training(backend, model, optimizer, dtype, chosen_level, sample_input, inplace)
    return result.model if result.optimizer is None else (result.model, result.optimizer)


@overridable
def prepare_training(
    backend: "BaseBackend",
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    dtype: Dtype = None,
    level: Level = None,
    sample_input: Any = None,
    inplace: bool = False,
) -> PreparedTraining:
    """Like `optimize_for_training`, but return the results with a report."""
    return preparation.prepare_training(backend, model, optimizer, dtype, level, sample_input, inplace)


def _one_of(level: Level, other_name: Level) -> Level:
    if level is not None and other_name is not None:
        raise UserError(
            "both level and optimization_level were passed", "they are two names of one option: pass only one"
        )
    return other_name if level is None else level
