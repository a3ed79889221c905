"""Replace modules by kernels that were measured to be faster: a pass of level O3, and a function that measures."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cluster.errors import UserError
from workers.devices.backends.dtype_checks import require_dtype
from workers.devices.backends.precision import precision_of
from workers.devices.backends.user_methods import record_report
from workers.kernels.models import kernel_insertion
from workers.kernels.models.kernel_insertion import InsertedKernels
from workers.measurement.inputs import Sample, as_sample
from workers.models.passes.pass_context import PassContext, PreparedModel, SkipPass, outputs, require_close

if TYPE_CHECKING:
    from workers.devices.backends.base import BaseBackend

MAX_RELATIVE_CHANGE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Maximum change of an output, relative to its largest value: a kernel rounds once, a module also in between."""


def custom_kernels(model: nn.Module, context: PassContext) -> nn.Module:
    """Insert the kernels that stored measurements for this device and software prefer. Measures nothing itself."""
    if context.sample is None:
        raise SkipPass("the sizes of its rows are unknown without a sample input")
    expected = outputs(model, context.sample)
    fitted = _insert_kernels(model, context.sample, context)
    if not fitted.chosen:
        raise SkipPass(_main_reason(fitted))
    _require_close(model, context.sample, expected)
    context.details["custom_kernels"] = str(fitted)
    return model


def prepare_model_with_custom_kernels(
    backend: "BaseBackend", model: nn.Module, sample_input: Any = None, dtype: "str | torch.dtype | None" = None
) -> PreparedModel:
    """Copy `model` to the device (in `dtype` unless None) with kernels where they are faster than its modules.

    The times of a call with `sample_input` are measured now and stored, as `polyfleet kernels tune` does. The report
    lists which modules have which kernels with what gain, and why others have none; `restore_model` removes them.

    Raises UserError without a sample input, for a dtype the device has no units for, and for an object that is not a
    Module.
    """
    from workers.kernels.models.kernel_insertion import measure_calls
    from workers.models.optimizers.preparation import own_copy, require_module

    require_module(model)
    target_dtype = precision_of(dtype)
    require_dtype(backend, target_dtype)
    sample = as_sample(sample_input)
    if sample is None:
        raise UserError("custom kernels are chosen by measuring, which needs a sample input", "pass sample_input")
    model_copy = own_copy(model, backend)
    model_copy = model_copy if dtype is None else model_copy.to(target_dtype)
    inputs = _cast(backend.to_device(sample), model_copy)
    context = PassContext(backend, target_dtype, model_copy.training, inputs)
    expected = outputs(model_copy, inputs)
    measure_calls(model_copy, inputs, backend.device)
    fitted = _insert_kernels(model_copy, inputs, context)
    if fitted.chosen:
        _require_close(model_copy, inputs, expected)
    applied = ["placement", *([f"custom_kernels: {fitted}"] if fitted.chosen else [])]
    skipped = (
        fitted.unchanged_modules
        if fitted.chosen
        else {"custom_kernels": _main_reason(fitted), **fitted.unchanged_modules}
    )
    report = PreparedModel(model_copy, applied, skipped)
    record_report(backend, report)
    return report


def restore_model(model: nn.Module) -> nn.Module:
    """Remove the kernels and return the model: it computes with its own modules, bit for bit as before."""
    kernel_insertion.restore(model)
    return model


def _insert_kernels(model: nn.Module, sample: Sample, context: PassContext) -> InsertedKernels:
    try:
        return kernel_insertion.fit(
            model, sample, context.backend.device, training=context.is_training(model), compiled=context.will_compile
        )
    except (TypeError, RuntimeError) as e:
        kernel_insertion.restore(model)
        raise SkipPass(f"the model does not run with kernels: {str(e).splitlines()[0]}") from e


def _require_close(model: nn.Module, sample: Sample, expected: list[torch.Tensor]) -> None:
    """Raise SkipPass, after removing the kernels, if they change the model's output too much."""
    actual = outputs(model, sample)
    limit = max(MAX_RELATIVE_CHANGE.get(one.dtype, MAX_RELATIVE_CHANGE[torch.float32]) for one in [*actual, *expected])
    try:
        require_close(actual, expected, limit)
    except SkipPass:
        kernel_insertion.restore(model)
        raise


def _main_reason(fitted: InsertedKernels) -> str:
    """Why no kernels are used: the most frequent reason."""
    reasons = list(fitted.unchanged_modules.values())
    if not reasons:
        return "no module of the model computes an operation that kernels implement"
    most = max(dict.fromkeys(reasons), key=reasons.count)
    return f"{len(reasons)} modules are unchanged, most of them because: {most}"


def _cast(sample: Sample, model: nn.Module) -> Sample:
    """Convert floating-point inputs to the dtype of the model's weights."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    def cast(value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floats else value

    return Sample(tuple(map(cast, sample.args)), {name: cast(value) for name, value in sample.kwargs.items()})
