"""Prepare: load a model, optimise it for this device, check it against the untouched one, keep it with its report."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from cluster.errors import UserError
from workers.backends.parts.precision import name_of, precision_of
from workers.checkpoint import save
from workers.optimization_levels import OptimizationLevel
from workers.optimizers.output_difference import Difference, difference, first_tensor
from workers.optimizers.pass_context import PreparedModel, Sample
from workers.optimizers.passes import unwrap
from workers.optimizers.prepared_model import artefact
from workers.tasks.context import Context
from workers.tasks.model_factory import make_model, make_sample, parameter_count, tensor_bytes

# How far a prepared model may be from the float32 one on the CPU, relative to the largest output.
PORTABLE = (OptimizationLevel.O0, OptimizationLevel.O1)
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def main(context: Context) -> dict[str, Any]:
    """The report: level, applied, skipped, errors (None without a sample input), parameters, bytes, artefact."""
    level = OptimizationLevel.from_string(context.arguments.get("level") or "O1")
    precision = precision_of(context.arguments.get("precision") or context.precision)
    model, sample = make_model(context).eval(), make_sample(context)
    with context.backend as backend:
        prepared = backend.prepare(model, level, sample, precision)
        portable = prepared if level in PORTABLE else backend.prepare(model, PORTABLE[-1], sample, precision)
        error = None if sample is None else _checked(context, model, prepared.model, sample, precision)
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
    return report | {"artefact": _keep(context, portable, report)}


def _checked(
    context: Context, model: nn.Module, prepared: nn.Module, sample: Sample, precision: torch.dtype
) -> Difference:
    """The distance from the caller's model. Raises UserError beyond the tolerance: a wrong model is no artefact."""
    given, inputs = sample.copy(), context.backend.to_device(sample.copy())
    with torch.no_grad():
        want = first_tensor(model.eval()(*given.args, **given.kwargs))
        have = first_tensor(prepared(*inputs.args, **inputs.kwargs))
    error = difference(have, want)
    if not error.max_rel <= TOLERANCE[precision]:
        raise UserError(
            f"the prepared model is off by {error.max_rel:.2g} of its largest output, over {TOLERANCE[precision]:g}",
            "prepare it at a lower level or in float32",
        )
    return error


def _keep(context: Context, portable: PreparedModel, report: dict[str, Any]) -> str:
    """The tensors and what was done to them as a checkpoint of step 0; "" where the job has no folder for it.

    What a compiler made of them stays out: it is made anew where workers.load_prepared loads the artefact.
    """
    if not context.checkpoint_root:
        return ""
    state = artefact(portable, context.entry, report)
    saved = save(Path(context.checkpoint_root), 0, state, attempt=context.attempt, kind=context.kind)
    return str(saved.path)
