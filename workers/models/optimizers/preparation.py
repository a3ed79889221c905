"""Prepare a caller's model for a device: copy it, move it, apply its passes. Functions over a back end.

Preparing a prepared model starts from the original form: nothing is wrapped twice. A precision or level that the caller
does not pass again stays as it was.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from cluster.errors import UserError
from workers.devices.backends import device_transfer
from workers.devices.backends.device_facts import precision
from workers.devices.backends.dtype_checks import require_dtype
from workers.devices.backends.precision import precision_of
from workers.devices.backends.user_methods import record_report
from workers.kernels.models.kernel_insertion import restore as take_kernels_out
from workers.measurement.inputs import as_sample
from workers.models.optimizers import parameter_links, passes
from workers.models.optimizers.passes import unwrap
from workers.models.passes.low_precision import require_trainable
from workers.models.passes.pass_context import PassContext, PreparedModel, deep_copy, restore_forward
from workers.options.config import compile_mode_of
from workers.options.optimization_levels import OptimizationLevel

if TYPE_CHECKING:
    from workers.devices.backends.base import BaseBackend

Dtype = str | torch.dtype | None
Level = str | OptimizationLevel | None
MARK = "_polyfleet_prepared"
"""Attribute of a prepared module: the level and precision it was prepared with, and whether we compiled it."""


class PreparationMark(NamedTuple):
    level: str
    precision: str
    compiled: bool


class PreparedTraining(NamedTuple):
    """A model and its optimizer ready to train, with the passes applied and skipped."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    applied: list[str]
    skipped: dict[str, str]


def prepare(
    backend: "BaseBackend",
    model: nn.Module,
    level: Level = None,
    sample_input: Any = None,
    dtype: Dtype = None,
    *,
    inference: bool = False,
) -> PreparedModel:
    """Prepare a copy on the device, in the model's own mode, or in eval mode for `inference`.

    See workers.models.compat.prepare_model.
    """
    chosen, context = _make_context(backend, model, level, sample_input, dtype, training=False)
    own_model = own_copy(model, backend)
    report = _apply_passes(own_model.eval() if inference else own_model, chosen, context)
    record_report(backend, report)
    return report


def prepare_training(
    backend: "BaseBackend",
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    dtype: Dtype = None,
    level: Level = None,
    sample_input: Any = None,
    inplace: bool = False,
) -> PreparedTraining:
    """Prepare a model and its optimizer for training. Wrong arguments are refused before anything is copied or moved.

    See workers.models.compat.optimize_for_training.
    """
    chosen, context = _make_context(backend, model, level, sample_input, dtype, training=True)
    if optimizer is not None:
        parameter_links.check_parameters(optimizer, model, backend.device)
    own_model = move_to_device(model, backend) if inplace else own_copy(model, backend)
    report = _apply_passes(own_model, chosen, context)
    record_report(backend, report)
    if optimizer is not None:
        parameter_links.bind_optimizer(optimizer, own_model, backend.device, backend.traits.fused_optimizers)
    return PreparedTraining(report.model, optimizer, report.applied, report.skipped)


def _make_context(
    backend: "BaseBackend", model: nn.Module, level: Level, sample_input: Any, dtype: Dtype, training: bool
) -> tuple[OptimizationLevel, PassContext]:
    """Check the arguments, before anything is copied or moved. Return the level and the context of the passes."""
    require_module(model)
    before: PreparationMark | None = unwrap(model).__dict__.get(MARK)
    defaults = (before.level, before.precision) if before else (backend.optimization_level, precision(backend))
    chosen = OptimizationLevel.from_string(defaults[0] if level is None else level)
    sample = as_sample(sample_input)
    target_dtype = precision_of(defaults[1] if dtype is None else dtype)
    require_dtype(backend, target_dtype)
    if training:
        require_trainable(target_dtype)
    device_transfer.check_device(sample, backend.device)
    mode = compile_mode_of(backend.config)
    return chosen, PassContext(backend, target_dtype, training, backend.to_device(sample), compile_mode=mode)


def require_module(model: Any) -> None:
    """Raise UserError for an object that is not a Module."""
    if not isinstance(model, nn.Module):
        raise UserError(f"a model must be a torch.nn.Module, not {type(model).__name__}", "return the module itself")


def own_copy(model: nn.Module, backend: "BaseBackend") -> nn.Module:
    """Return a copy on the device, without the overrides of an earlier preparation."""
    model_copy = deep_copy(model)
    parameter_links.record_origin(model_copy, model)
    return move_to_device(model_copy, backend)


def move_to_device(model: nn.Module, backend: "BaseBackend") -> nn.Module:
    """Move the model itself to the device, and remove the overrides of an earlier preparation."""
    before = list(model.parameters())
    parameter_links.update_after_move(device_transfer.move_module(model, backend.device), before)
    inner = unwrap(model)
    take_kernels_out(inner)
    mark: PreparationMark | None = inner.__dict__.pop(MARK, None)
    if mark is not None:
        for module in inner.modules():
            restore_forward(module)
        if mark.compiled:
            inner._compiled_call_impl = None
    return model


def _apply_passes(model: nn.Module, level: OptimizationLevel, context: PassContext) -> PreparedModel:
    prepared = passes.run(model, level, context)
    mark(prepared.model, level, prepared.applied)
    return prepared


def mark(model: nn.Module, level: OptimizationLevel, applied: list[str]) -> None:
    """Record how `model` was prepared, for a later preparation."""
    details = dict(entry.partition(": ")[::2] for entry in applied)
    unwrap(model).__dict__[MARK] = PreparationMark(
        level.value, details.get("autocast", "float32"), "compile" in details
    )
