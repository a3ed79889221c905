"""Prepare task: load a model, optimize it for this device, compare it with the original, save it with a report."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from cluster.errors import UserError
from workers.checkpoint import save
from workers.devices.backends.precision import name_of, precision_of
from workers.measurement.inputs import Sample
from workers.measurement.output_difference import Difference, difference, first_tensor
from workers.models import compat
from workers.models.optimizers.passes import unwrap
from workers.models.passes.pass_context import PreparedModel
from workers.options.optimization_levels import OptimizationLevel
from workers.tasks.context import Context
from workers.tasks.model_factory import make_model, make_sample, parameter_count, tensor_bytes
from workers.tasks.prepared_model import artefact_state

# Levels whose prepared model also loads on other devices.
PORTABLE = (OptimizationLevel.O0, OptimizationLevel.O1)
# Largest allowed difference from the float32 model on the CPU, relative to the largest output.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def main(context: Context) -> dict[str, Any]:
    """Return the report: level, applied, skipped, errors (None without a sample input), parameters, bytes, artefact."""
    level = OptimizationLevel.from_string(context.arguments.get("level") or "O1")
    precision = precision_of(context.arguments.get("precision") or context.precision)
    model, sample = make_model(context).eval(), make_sample(context)
    with context.backend as backend:
        prepared = compat.prepare(backend, model, level, sample, precision)
        portable = prepared if level in PORTABLE else compat.prepare(backend, model, PORTABLE[-1], sample, precision)
        error = None if sample is None else _check_accuracy(context, model, prepared.model, sample, precision)
    report: dict[str, Any] = {
        "level": level.value,
        "precision": name_of(precision),
        "applied": prepared.applied,
        "skipped": prepared.skipped,
        "max_abs_error": error.max_abs if error else None,
        "max_rel_error": error.max_rel if error else None,
        "parameters": parameter_count(unwrap(portable.model)),
        "bytes": tensor_bytes(unwrap(portable.model)),
    }
    return report | {"artefact": _save_artefact(context, portable, report)}


def _check_accuracy(
    context: Context, model: nn.Module, prepared: nn.Module, sample: Sample, precision: torch.dtype
) -> Difference:
    """Compare with the caller's model. Raises UserError beyond TOLERANCE, so that no wrong model is saved."""
    arguments, inputs = sample.copy(), context.backend.to_device(sample.copy())
    with torch.no_grad():
        expected = first_tensor(model.eval()(*arguments.args, **arguments.kwargs))
        actual = first_tensor(prepared(*inputs.args, **inputs.kwargs))
    error = difference(actual, expected)
    if not error.max_rel <= TOLERANCE[precision]:
        raise UserError(
            f"the prepared model is off by {error.max_rel:.2g} of its largest output (limit {TOLERANCE[precision]:g})",
            "prepare the model at a lower level or in float32",
        )
    return error


def _save_artefact(context: Context, portable: PreparedModel, report: dict[str, Any]) -> str:
    """Save the tensors and the applied passes as a checkpoint of step 0; "" if the job has no checkpoint folder.

    Compiled code is not saved: workers.load_prepared compiles again on its device.
    """
    if not context.checkpoint_root:
        return ""
    state = artefact_state(portable, context.entry, report)
    saved = save(Path(context.checkpoint_root), 0, state, attempt=context.attempt, kind=context.kind)
    return str(saved.path)
