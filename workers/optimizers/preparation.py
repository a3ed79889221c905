"""Turning a caller's model into one ready for a device: copied, placed, its passes applied. Functions over a back end.

Preparing what was prepared before starts from the model as it was: nothing is wrapped twice, and what the caller does
not name anew (precision, level) stays as it was prepared.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from cluster.errors import UserError
from workers.backends.parts import device_transfer
from workers.backends.parts.precision import precision_of
from workers.config import compile_mode_of
from workers.kernels.models.kernel_insertion import restore as take_kernels_out
from workers.optimization_levels import OptimizationLevel
from workers.optimizers import parameter_links, passes
from workers.optimizers.forward_override import restore
from workers.optimizers.low_precision import require_trainable
from workers.optimizers.pass_context import PassContext, PreparedModel, as_sample, deep_copy
from workers.optimizers.passes import unwrap

if TYPE_CHECKING:
    from workers.backends.base import BaseBackend

Dtype = str | torch.dtype | None
Level = str | OptimizationLevel | None
MARK = "_polyfleet_prepared"
"""On a prepared module: (level, precision) it was prepared with, and whether its compiler is ours."""


class Mark(NamedTuple):
    level: str
    precision: str
    compiled: bool


class Trained(NamedTuple):
    """A model and its optimizer ready to train, with what was and was not done."""

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
    """A copy on the device, in the model's own mode, or in eval mode for `inference`. See
    CompatMethods.prepare_model.
    """
    chosen, work = _work(backend, model, level, sample_input, dtype, training=False)
    mine = own_copy(model, backend)
    backend.report = _pass(mine.eval() if inference else mine, chosen, work)
    return backend.report


def prepare_training(
    backend: "BaseBackend",
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    dtype: Dtype = None,
    level: Level = None,
    sample_input: Any = None,
    inplace: bool = False,
) -> Trained:
    """See CompatMethods.optimize_for_training. What a caller gets wrong is refused before anything is copied or
    moved.
    """
    chosen, work = _work(backend, model, level, sample_input, dtype, training=True)
    if optimizer is not None:
        parameter_links.check_parameters(optimizer, model, backend.device)
    mine = placed(model, backend) if inplace else own_copy(model, backend)
    backend.report = _pass(mine, chosen, work)
    if optimizer is not None:
        parameter_links.bind(optimizer, mine, backend.device, backend.traits.fused_optimizers)
    return Trained(backend.report.model, optimizer, backend.report.applied, backend.report.skipped)


def _work(
    backend: "BaseBackend", model: nn.Module, level: Level, sample_input: Any, dtype: Dtype, training: bool
) -> tuple[OptimizationLevel, PassContext]:
    """Everything a caller can get wrong is refused here, before anything is copied or moved."""
    require_module(model)
    before: Mark | None = unwrap(model).__dict__.get(MARK)
    usual = (before.level, before.precision) if before else (backend.optimization_level, backend.precision)
    chosen = OptimizationLevel.from_string(usual[0] if level is None else level)
    sample = as_sample(sample_input)
    wanted = precision_of(usual[1] if dtype is None else dtype)
    backend.require_dtype(wanted)
    if training:
        require_trainable(wanted)
    device_transfer.check_device(sample, backend.device)
    mode = compile_mode_of(backend.config)
    return chosen, PassContext(backend, wanted, training, backend.to_device(sample), compile_mode=mode)


def require_module(model: Any) -> None:
    """Raises UserError for what is no Module."""
    if not isinstance(model, nn.Module):
        raise UserError(f"a model must be a torch.nn.Module, not {type(model).__name__}", "return the module itself")


def own_copy(model: nn.Module, backend: "BaseBackend") -> nn.Module:
    """A copy on the device, without what an earlier preparation put around it."""
    mine = deep_copy(model)
    parameter_links.record_origin(mine, model)
    return placed(mine, backend)


def placed(model: nn.Module, backend: "BaseBackend") -> nn.Module:
    """Itself on the device, and without what an earlier preparation put around it."""
    before = list(model.parameters())
    parameter_links.update_after_move(device_transfer.move_module(model, backend.device), model, before)
    inner = unwrap(model)
    take_kernels_out(inner)
    mark: Mark | None = inner.__dict__.pop(MARK, None)
    if mark is not None:
        for module in inner.modules():
            restore(module)
        if mark.compiled:
            inner._compiled_call_impl = None
    return model


def _pass(model: nn.Module, level: OptimizationLevel, work: PassContext) -> PreparedModel:
    done = passes.run(model, level, work)
    mark(done.model, level, done.applied)
    return done


def mark(model: nn.Module, level: OptimizationLevel, applied: list[str]) -> None:
    """Remember how `model` was prepared, for whoever prepares it again."""
    told = dict(entry.partition(": ")[::2] for entry in applied)
    unwrap(model).__dict__[MARK] = Mark(level.value, told.get("autocast", "float32"), "compile" in told)
