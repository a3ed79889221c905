"""Trace one call, or two training steps, of a module on fake tensors: its true peak, without using the memory."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from cluster.errors import UserError
from workers.devices.backends.device_transfer import tensors_of
from workers.devices.backends.precision import dtype_of
from workers.measurement.inputs import Sample
from workers.models.memory.estimate import MemoryEstimate
from workers.models.memory.fake_copies import fake_copy, fake_sample, sample_for, tensors_in
from workers.models.memory.forked_trace import AUTOGRAD_ALREADY_STARTED, run_forked
from workers.models.memory.formulas import find_optimizer
from workers.models.memory.live_bytes import LiveBytes
from workers.models.memory.trace_contexts import ComposedOps, silence

TRACED = "traced on fake tensors"
COMPILED = f"{TRACED}, as one compiled XLA program"
# A shape that depends on values cannot be computed on fake tensors, which have none.
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    batch: int | None
    seq: int | None
    dtype: Any
    training: bool
    optimizer: Any
    loss: Callable[[Any], Any] | None
    xla: bool


@dataclass(slots=True)
class TracedBytes:
    """Bytes of the last training step: saved by forward, all gradients, gradients that are views, and the peaks."""

    saved: int = 0
    gradients: int = 0
    view_gradients: int = 0
    forward: int = 0
    backward: int = 0
    step: int = 0


def estimate(model: Any, sample_input: Any, request: TraceRequest) -> MemoryEstimate:
    """Estimate a module's memory by tracing it. Raises UserError if it cannot be traced. Does not change it."""
    if not isinstance(model, nn.Module):
        raise UserError(
            f"memory of a {type(model).__name__} cannot be estimated",
            "pass a torch.nn.Module, a TransformerShape, or a configuration with a transformer's dimensions",
        )
    dtype = _floating_dtype(request.dtype)
    sample = sample_for(model, sample_input, request.batch, request.seq)
    make = _optimizer_factory(request.optimizer)
    if not request.training:
        return _trace(model, sample, dtype, make, request)
    return run_forked(lambda: _trace(model, sample, dtype, make, request))


def _trace(
    model: nn.Module,
    sample: Sample,
    dtype: torch.dtype | None,
    make: Callable[[Any], Any] | None,
    request: TraceRequest,
) -> MemoryEstimate:
    try:
        with silence(), FakeTensorMode(allow_non_fake_inputs=True), ComposedOps(), _attention(request.xla):
            fake_model, inputs = fake_copy(model, dtype), fake_sample(sample, request.batch, request.seq, dtype)
            return (
                _train(fake_model, inputs, make, request)
                if request.training
                else _infer(fake_model, inputs, request.xla)
            )
    except NEEDS_VALUES as e:
        raise UserError(
            f"the model cannot be traced without data: {type(e).__name__} at {e}",
            "estimate the part before the step that reads values, or pass a TransformerShape",
        ) from e
    except Exception as e:  # the user's forward may raise anything on tensors without values
        if isinstance(e, UserError) or AUTOGRAD_ALREADY_STARTED in str(e):
            raise
        raise UserError(
            f"the model fails on this sample input: {(str(e) or type(e).__name__).splitlines()[0]}",
            "pass as sample_input the arguments of one call of the model",
        ) from e


def _infer(model: nn.Module, inputs: Sample, xla: bool) -> MemoryEstimate:
    live, weights = LiveBytes(), tensors_in(model)
    weights_bytes = live.watch(weights)
    live.watch(tensors_of(inputs))
    model.eval()
    with torch.no_grad(), live:
        output = model(*inputs.args, **inputs.kwargs)
    view_bytes = _views(tree_leaves(output)) if xla else 0
    activations, method = live.peak - weights_bytes, COMPILED if xla else TRACED
    return MemoryEstimate(
        weights_bytes,
        activations_bytes=activations,
        workspace_bytes=view_bytes,
        total_bytes=weights_bytes + activations + view_bytes,
        method=method,
    )


def _train(
    model: nn.Module, inputs: Sample, make: Callable[[Any], Any] | None, request: TraceRequest
) -> MemoryEstimate:
    """Trace two training steps: the first creates the optimizer's state, the second is measured."""
    model.train()
    live, weights = LiveBytes(), tensors_in(model)
    weights_bytes = live.watch(weights)
    live.watch(tensors_of(inputs))
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise UserError("no weight of the model requires a gradient", "estimate it with mode='inference'")
    optimizer = make(trained) if make else None
    _step(model, inputs, optimizer, request.loss, live)
    state = (
        _bytes(value for parameter_state in optimizer.state.values() for value in parameter_state.values())
        if optimizer
        else 0
    )
    views: list[int] = []
    for weight in trained:
        weight.register_hook(lambda gradient: views.append(_views([gradient])))  # type: ignore[no-untyped-call]
    traced = _step(model, inputs, optimizer, request.loss, live)
    traced.view_gradients = sum(views)
    return (_compiled if request.xla else _eager)(weights_bytes, state, traced)


def _step(model: nn.Module, inputs: Sample, optimizer: Any, loss: Any, live: LiveBytes) -> TracedBytes:
    """Run one training step and measure the peak of each phase: forward, backward and the optimizer's step."""
    traced, before = TracedBytes(), live.now
    with live:
        value = _loss(model(*inputs.args, **inputs.kwargs), loss)
    traced.forward, traced.saved = live.peak, live.now - before
    with live:
        value.backward()  # type: ignore[no-untyped-call]
        del value
    traced.backward = live.peak
    traced.gradients = _bytes(p.grad for p in model.parameters())
    if optimizer is not None:
        with live:
            optimizer.step()
        traced.step = live.peak
    model.zero_grad()
    return traced


def _eager(weights: int, state: int, traced: TracedBytes) -> MemoryEstimate:
    peak, total = max(
        ("forward", traced.forward), ("backward", traced.backward), ("step", traced.step), key=lambda p: p[1]
    )
    accounted = weights + state + (traced.gradients if peak == "step" else traced.saved)
    return MemoryEstimate(
        weights, traced.gradients, state, traced.saved,
        workspace_bytes=max(total - accounted, 0), total_bytes=total, peak=peak, method=TRACED,
    )  # fmt: skip


def _compiled(weights: int, state: int, traced: TracedBytes) -> MemoryEstimate:
    """Estimate a step that one XLA program computes.

    Its arguments, weights and state, are donated: the new values reuse their memory. Gradients are results of the
    program. A gradient that is a view (a linear layer's, transposed) is a result in addition to the tensor it views.
    Temporaries are those of backward, including its gradients, or those of the optimizer's step, when all gradients
    exist. Derived from XLA's buffer assignments; fusion, changed layouts and recomputation are not modelled.
    """
    temporaries = max(traced.backward, traced.step - traced.gradients) - weights - state
    return MemoryEstimate(
        weights, traced.gradients, state, traced.saved,
        workspace_bytes=max(traced.view_gradients + temporaries - traced.saved, 0),
        total_bytes=weights + state + traced.gradients + traced.view_gradients + max(temporaries, traced.saved),
        peak="step", method=COMPILED,
    )  # fmt: skip


def _views(values: Any) -> int:
    """Bytes of the tensors that are views: torch-xla returns both the view and its base from a program."""
    return _bytes(t for t in values if isinstance(t, torch.Tensor) and t._is_view())


def _loss(output: Any, loss: Any) -> torch.Tensor:
    if loss is not None:
        value = loss(output)
    elif isinstance(getattr(output, "loss", None), torch.Tensor):
        value = output.loss
    else:
        value = sum(t.mean() for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise UserError(
            "the loss is not a scalar tensor", "pass as loss a function that computes a scalar from the model's output"
        )
    return value


def _attention(xla: bool) -> AbstractContextManager[Any]:
    """XLA has none of torch's fused attention kernels, so it computes the scores and keeps them in memory."""
    return sdpa_kernel(SDPBackend.MATH) if xla else nullcontext()


def _optimizer_factory(optimizer: Any) -> Callable[[Any], Any] | None:
    if optimizer is None or (callable(optimizer) and not isinstance(optimizer, str)):
        return optimizer
    rule = find_optimizer(optimizer)
    return lambda weights: getattr(torch.optim, rule.torch_name)(weights, lr=1e-3, **rule.options)


def _floating_dtype(requested_dtype: Any) -> torch.dtype | None:
    if requested_dtype is None:
        return None
    dtype = dtype_of(requested_dtype)
    if not dtype.is_floating_point:
        raise UserError(
            f"weights are not trained or run in {requested_dtype}", "write a floating-point dtype, such as bfloat16"
        )
    return dtype


def _bytes(values: Any) -> int:
    return sum(t.numel() * t.element_size() for t in values if isinstance(t, torch.Tensor))
