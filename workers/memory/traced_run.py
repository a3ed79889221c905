"""One call, or two training steps, of a module on fake tensors, watched: the real peak without the real memory."""

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
from workers.backends.parts.device_transfer import tensors_of
from workers.backends.parts.precision import dtype_of
from workers.memory.composite_ops import ComposedOps
from workers.memory.estimate import MemoryEstimate
from workers.memory.fake_copies import fake_copy, fake_sample, sample_for, tensors_in
from workers.memory.forked_trace import STARTED_HERE, run_forked
from workers.memory.live_bytes import LiveBytes
from workers.memory.optimizers import find_optimizer
from workers.optimizers.pass_context import Sample
from workers.torch_logs import silenced

TRACED = "traced on fake tensors"
COMPILED = f"{TRACED}, as one compiled XLA program"
# A shape that depends on values has no answer without them.
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
    """Bytes of the last training step: what forward kept, all gradients, those of them that are views, the peaks."""

    kept: int = 0
    gradients: int = 0
    viewed: int = 0
    forward: int = 0
    backward: int = 0
    step: int = 0


def estimate(model: Any, sample_input: Any, request: TraceRequest) -> MemoryEstimate:
    """Raises UserError where the module cannot be traced; the caller's module is only read."""
    if not isinstance(model, nn.Module):
        raise UserError(
            f"memory of a {type(model).__name__} cannot be estimated",
            "give a torch.nn.Module, a TransformerShape, or a configuration with a transformer's numbers",
        )
    dtype = _floating(request.dtype)
    sample = sample_for(model, sample_input, request.batch, request.seq)
    make = _maker(request.optimizer)
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
        with silenced(), FakeTensorMode(allow_non_fake_inputs=True), ComposedOps(), _attention(request.xla):
            twin, inputs = fake_copy(model, dtype), fake_sample(sample, request.batch, request.seq, dtype)
            return _train(twin, inputs, make, request) if request.training else _infer(twin, inputs, request.xla)
    except NEEDS_VALUES as e:
        raise UserError(
            f"the model cannot be traced without data: {type(e).__name__} at {e}",
            "estimate the part before the step that reads values, or give a TransformerShape",
        ) from e
    except Exception as e:  # the user's forward on tensors without values: anything may come out of it
        if isinstance(e, UserError) or STARTED_HERE in str(e):
            raise
        raise UserError(
            f"the model fails on this sample input: {(str(e) or type(e).__name__).splitlines()[0]}",
            "give as sample_input what one call of the model takes",
        ) from e


def _infer(model: nn.Module, inputs: Sample, xla: bool) -> MemoryEstimate:
    live, weights = LiveBytes(), tensors_in(model)
    held = live.watch(weights)
    live.watch(tensors_of(inputs))
    model.eval()
    with torch.no_grad(), live:
        output = model(*inputs.args, **inputs.kwargs)
    viewed = _views(tree_leaves(output)) if xla else 0
    needed, found = live.peak - held, COMPILED if xla else TRACED
    return MemoryEstimate(
        held, activations_bytes=needed, workspace_bytes=viewed, total_bytes=held + needed + viewed, found_by=found
    )


def _train(
    model: nn.Module, inputs: Sample, make: Callable[[Any], Any] | None, request: TraceRequest
) -> MemoryEstimate:
    """The first step makes the optimizer's state, the second is the one that counts."""
    model.train()
    live, weights = LiveBytes(), tensors_in(model)
    held = live.watch(weights)
    live.watch(tensors_of(inputs))
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise UserError("no weight of the model requires a gradient", "estimate it with mode='inference'")
    optimizer = make(trained) if make else None
    _step(model, inputs, optimizer, request.loss, live)
    state = _bytes(value for kept in optimizer.state.values() for value in kept.values()) if optimizer else 0
    views: list[int] = []
    for weight in trained:
        weight.register_hook(lambda gradient: views.append(_views([gradient])))  # type: ignore[no-untyped-call]
    seen = _step(model, inputs, optimizer, request.loss, live)
    seen.viewed = sum(views)
    return (_compiled if request.xla else _eager)(held, state, seen)


def _step(model: nn.Module, inputs: Sample, optimizer: Any, loss: Any, live: LiveBytes) -> TracedBytes:
    """Zero gradients, forward, backward, step; each phase with its own peak."""
    seen, before = TracedBytes(), live.now
    with live:
        value = _loss(model(*inputs.args, **inputs.kwargs), loss)
    seen.forward, seen.kept = live.peak, live.now - before
    with live:
        value.backward()  # type: ignore[no-untyped-call]
        del value
    seen.backward = live.peak
    seen.gradients = _bytes(p.grad for p in model.parameters())
    if optimizer is not None:
        with live:
            optimizer.step()
        seen.step = live.peak
    model.zero_grad()
    return seen


def _eager(weights: int, state: int, seen: TracedBytes) -> MemoryEstimate:
    peak, total = max(("forward", seen.forward), ("backward", seen.backward), ("step", seen.step), key=lambda p: p[1])
    there = weights + state + (seen.gradients if peak == "step" else seen.kept)
    return MemoryEstimate(
        weights, seen.gradients, state, seen.kept,
        workspace_bytes=max(total - there, 0), total_bytes=total, peak=peak, found_by=TRACED,
    )  # fmt: skip


def _compiled(weights: int, state: int, seen: TracedBytes) -> MemoryEstimate:
    """One program makes the whole step. Its arguments, weights and state, are donated: their new values take their
    place. Gradients are results of it, and a gradient that is a view (a linear layer's, transposed) one beside what it
    views. Temporaries are what backward holds, its gradients too, or the optimizer's step, with every gradient at hand.
    Read off XLA's buffer assignments; what the compiler fuses, lays out anew or computes twice is not modelled.
    """
    temporaries = max(seen.backward, seen.step - seen.gradients) - weights - state
    return MemoryEstimate(
        weights, seen.gradients, state, seen.kept,
        workspace_bytes=max(seen.viewed + temporaries - seen.kept, 0),
        total_bytes=weights + state + seen.gradients + seen.viewed + max(temporaries, seen.kept),
        peak="step", found_by=COMPILED,
    )  # fmt: skip


def _views(values: Any) -> int:
    """Bytes of the tensors that are views: torch-xla hands both the view and what it views out of a program."""
    return _bytes(t for t in values if isinstance(t, torch.Tensor) and t._is_view())


def _loss(output: Any, loss: Any) -> torch.Tensor:
    if loss is not None:
        value = loss(output)
    elif isinstance(getattr(output, "loss", None), torch.Tensor):
        value = output.loss
    else:
        value = sum(t.mean() for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise UserError("the loss is no scalar tensor", "give as loss a function of the model's output that makes one")
    return value


def _attention(xla: bool) -> AbstractContextManager[Any]:
    """XLA has no fused attention kernel of torch's: there, scores are computed and kept."""
    return sdpa_kernel(SDPBackend.MATH) if xla else nullcontext()


def _maker(optimizer: Any) -> Callable[[Any], Any] | None:
    if optimizer is None or (callable(optimizer) and not isinstance(optimizer, str)):
        return optimizer
    rule = find_optimizer(optimizer)
    return lambda weights: getattr(torch.optim, rule.torch_name)(weights, lr=1e-3, **rule.options)


def _floating(word: Any) -> torch.dtype | None:
    if word is None:
        return None
    dtype = dtype_of(word)
    if not dtype.is_floating_point:
        raise UserError(f"weights are not trained or run in {word}", "give a floating-point dtype, such as bfloat16")
    return dtype


def _bytes(values: Any) -> int:
    return sum(t.numel() * t.element_size() for t in values if isinstance(t, torch.Tensor))
