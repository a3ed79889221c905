"""Benchmark: the time of a model's forward and training step on this device, and how far off its output is; or, for a
run over the fleet, a session that measures what it is told to.
"""

import copy
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import nn

from cluster.errors import UserError
from workers.backends.base import BaseBackend
from workers.backends.parts.precision import name_of, precision_of
from workers.benchmark.arm import Unsupported
from workers.benchmark.serving import serve
from workers.benchmark.session import Session
from workers.levels import OptimizationLevel
from workers.optimizers.comparing import difference, first_tensor
from workers.optimizers.fingerprint import inputs_sha256, weights_sha256
from workers.optimizers.work import Prepared, Sample
from workers.tasks import measure, models
from workers.tasks.context import Context
from workers.tasks.plain_values import plain
from workers.tasks.transformers_model import MissingLibraryError
from workers.validation import activations

ROUNDS, WARMUP = 15, 3
STEPS = 3
OUTPUT_SAMPLE = 256


def main(context: Context) -> dict[str, Any]:
    """Rows of timings, the divergence from this process's CPU in float32, and hashes that tell who ran the same."""
    asked = context.arguments
    if asked.get("session"):
        return _session(context)
    if asked.get("trace"):
        return _trace(context)
    level, precision = OptimizationLevel.from_string(asked.get("level") or "O1"), precision_of(context.precision)
    rounds, warmup = _count(asked, "rounds", ROUNDS, 1), _count(asked, "warmup", WARMUP, 0)
    model, sample = models.make_model(context), models.make_sample(context)
    if sample is None:
        raise UserError("a benchmark needs inputs", f"add sample_input(batch_size) beside {context.entry}, or name one")
    with torch.no_grad():
        reference = first_tensor(copy.deepcopy(model).eval()(*sample.args, **sample.kwargs))
    with context.backend as backend:
        started = perf_counter()
        prepared = backend.prepare(model, level, sample, precision)
        prepare_s = perf_counter() - started
        forward = measure.measure(_forward(prepared.model, backend.to_device(sample)), backend, warmup, rounds)
        rows = [measure.row("forward", forward, models.batch_size(context))]
        if asked.get("train", True):
            step = measure.measure(_training_step(backend, model, sample, level, precision), backend, warmup, rounds)
            rows.append(measure.row("training_step", step, models.batch_size(context)))
    output = first_tensor(forward.output).detach().cpu()
    return {"rows": rows, "prepare_s": prepare_s} | _facts(context, model, sample, prepared, output, reference)


def _trace(context: Context) -> dict[str, Any]:
    """Fingerprints of what the model computes here: see workers/validation/activations.py."""
    model, sample = models.make_model(context), models.make_sample(context)
    if sample is None:
        raise UserError(
            "a validation needs inputs", f"add sample_input(batch_size) beside {context.entry}, or name one"
        )
    with context.backend as backend:
        backend.require_dtype(precision_of(context.precision))
        steps = _count(context.arguments, "steps", STEPS, 0)
        told = activations.record(model, sample, backend, steps, lambda: backend.autocast(context.precision))
        info = backend.get_device_info(backend.device_id)
    here = {"kind": context.kind, "device": info.device_name, "torch": str(torch.__version__)}
    return told | here | {"precision": name_of(precision_of(context.precision))}


def _session(context: Context) -> dict[str, Any]:
    """Serve until the run ends; each device this attempt leases has a session of its own, made when first asked for."""
    sessions: dict[int, Session] = {}

    def user() -> tuple[nn.Module, Sample | None]:
        try:
            return models.make_model(context), models.make_sample(context)
        except MissingLibraryError as e:
            raise Unsupported(e.message) from e

    def handle(message: dict[str, Any]) -> Any:
        number = int(message.pop("device", 0))
        if number not in sessions:
            backend = context.backend if number == context.backend.device_id else _other(context.backend, number)
            sessions[number] = Session(backend, context.seed, user if context.entry else None)
        return sessions[number].handle(message)

    with context.backend:
        folder = context.events.folder
        if folder is None:
            raise UserError("a session needs an attempt's folder", "`polyfleet benchmark run` starts one")
        return {"session": serve(folder, handle, lambda: context.stop.asked)}


def _other(backend: BaseBackend, number: int) -> BaseBackend:
    return type(backend)(backend.config, device_id=number)


def _forward(model: nn.Module, sample: Sample) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            return model(*sample.args, **sample.kwargs)

    return call


def _training_step(
    backend: BaseBackend, model: nn.Module, sample: Sample, level: OptimizationLevel, precision: torch.dtype
) -> Callable[[], Any]:
    """Forward, mean square of the output as the loss, backward, and a step of plain SGD, on a copy of the model."""
    mine = copy.deepcopy(model).train()
    if not any(p.requires_grad for p in mine.parameters()):
        raise UserError("the model has no parameter to train", "set train: false in the benchmark's arguments")
    sgd = torch.optim.SGD(mine.parameters(), lr=1e-4)
    trained = backend.prepare_training(mine, sgd, precision, level, sample, inplace=True)
    inputs = backend.to_device(sample)

    def call() -> torch.Tensor:
        sgd.zero_grad()
        loss = first_tensor(trained.model(*inputs.args, **inputs.kwargs)).float().square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        sgd.step()
        return loss

    return call


def _facts(
    context: Context,
    model: nn.Module,
    sample: Sample,
    prepared: Prepared,
    output: torch.Tensor,
    reference: torch.Tensor,
) -> dict[str, Any]:
    gap = difference(output, reference)
    info = context.backend.get_device_info(context.backend.device_id)
    return {
        "divergence": plain({"max_abs": gap.max_abs, "max_rel": gap.max_rel, "reference": "cpu float32, this process"}),
        "weights_sha256": weights_sha256(model),
        "inputs_sha256": inputs_sha256(sample),
        "output_sample": plain(output.float().reshape(-1)[:OUTPUT_SAMPLE].tolist()),
        "output_shape": list(output.shape),
        "kind": context.kind,
        "device_name": info.device_name,
        "emulated": context.backend.emulated,
        "precision": name_of(precision_of(context.precision)),
        "applied": prepared.applied,
        "skipped": prepared.skipped,
        "batch_size": models.batch_size(context),
        "versions": info.runtime_versions,
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "parameters": models.parameter_count(model),
    }


def _count(asked: dict[str, Any], name: str, default: int, least: int) -> int:
    value = asked.get(name, default)
    if not isinstance(value, int) or value < least:
        raise UserError(f"{name} is {value!r}", f"give a whole number of at least {least}")
    return value
