"""Kernels in place of modules that they were measured to be faster than: a pass of level O3, and a function for it."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cluster.errors import UserError
from workers.backends.parts.precision import precision_of
from workers.kernels.models import kernel_insertion
from workers.kernels.models.kernel_insertion import Fitted
from workers.optimizers.pass_context import (
    PassContext,
    PreparedModel,
    Sample,
    SkipPass,
    as_sample,
    outputs,
    require_close,
)

if TYPE_CHECKING:
    from workers.backends.base import BaseBackend

CLOSE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""How far an output may move, relative to its largest value: each kernel rounds once where a module rounded in between.
"""


def custom_kernels(model: nn.Module, work: PassContext) -> nn.Module:
    """What is stored for this device and software decides; nothing is measured here."""
    if work.sample is None:
        raise SkipPass("without a sample input nobody knows of which sizes its rows are")
    want = outputs(model, work.sample)
    fitted = _fitted(model, work.sample, work)
    if not fitted.chosen:
        raise SkipPass(_why(fitted))
    _require_close(model, work.sample, want)
    work.details["custom_kernels"] = str(fitted)
    return model


def prepare_model_with_custom_kernels(
    backend: "BaseBackend", model: nn.Module, sample_input: Any = None, dtype: "str | torch.dtype | None" = None
) -> PreparedModel:
    """A copy of `model` on the device, in `dtype` where one is given, with kernels where they are faster than its
    modules in a call with `sample_input`: that is measured now, and stored as `polyfleet kernels tune` does. The
    report says which modules have which kernels with what gain, and why others have none; `restore_model` takes them
    out again.

    Raises UserError without a sample input, for a dtype that the device has no units for, and for what is no Module.
    """
    from workers.kernels.models.kernel_times import measure_calls
    from workers.optimizers.preparation import own_copy, require_module

    require_module(model)
    wanted = precision_of(dtype)
    backend.require_dtype(wanted)
    sample = as_sample(sample_input)
    if sample is None:
        raise UserError("custom kernels are chosen by measuring, and there is no sample input", "give sample_input")
    mine = own_copy(model, backend)
    mine = mine if dtype is None else mine.to(wanted)
    given = _cast(backend.to_device(sample), mine)
    work = PassContext(backend, wanted, mine.training, given)
    want = outputs(mine, given)
    measure_calls(mine, given, backend.device)
    fitted = _fitted(mine, given, work)
    if fitted.chosen:
        _require_close(mine, given, want)
    applied = ["placement", *([f"custom_kernels: {fitted}"] if fitted.chosen else [])]
    skipped = fitted.left if fitted.chosen else {"custom_kernels": _why(fitted), **fitted.left}
    backend.report = PreparedModel(mine, applied, skipped)
    return backend.report


def restore_model(model: nn.Module) -> nn.Module:
    """The model itself, computing by its own modules again, to the bit as before it got kernels."""
    kernel_insertion.restore(model)
    return model


def _fitted(model: nn.Module, sample: Sample, work: PassContext) -> Fitted:
    try:
        return kernel_insertion.fit(
            model, sample, work.backend.device, learns=work.learns(model), compiled=work.compiles
        )
    except (TypeError, RuntimeError) as e:
        kernel_insertion.restore(model)
        raise SkipPass(f"the model does not run with kernels: {str(e).splitlines()[0]}") from e


def _require_close(model: nn.Module, sample: Sample, want: list[torch.Tensor]) -> None:
    """Raises Skip for a model that answers otherwise with kernels, after these are taken out."""
    have = outputs(model, sample)
    limit = max(CLOSE.get(one.dtype, CLOSE[torch.float32]) for one in [*have, *want])
    try:
        require_close(have, want, limit)
    except SkipPass:
        kernel_insertion.restore(model)
        raise


def _why(fitted: Fitted) -> str:
    """The reason that most modules have."""
    reasons = list(fitted.left.values())
    if not reasons:
        return "no module of the model computes what kernels have"
    most = max(dict.fromkeys(reasons), key=reasons.count)
    return f"{len(reasons)} modules are left as they are, most of them because: {most}"


def _cast(sample: Sample, model: nn.Module) -> Sample:
    """Floating-point inputs in the dtype of the model's weights."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    def cast(value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floats else value

    return Sample(tuple(map(cast, sample.args)), {name: cast(value) for name, value in sample.kwargs.items()})
