"""Prepare one case on one device: build, check and warm it up, so that timed blocks contain nothing else."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from cluster.errors import UserError
from workers.benchmark.cases import reference
from workers.benchmark.cases.case_builder import BuiltCase
from workers.benchmark.cases.gradients import Gradients, flatten, gradients_in
from workers.benchmark.repeated_call import RepeatedCall
from workers.devices.backends.base import BaseBackend
from workers.devices.backends.device_transfer import tensors_of
from workers.devices.backends.dtype_checks import supports_dtype
from workers.devices.backends.precision import name_of, precision_of
from workers.measurement import accuracy
from workers.measurement.fingerprint import inputs_sha256, weights_sha256
from workers.measurement.inputs import Sample
from workers.measurement.output_difference import first_tensor
from workers.measurement.timing import Refill, Timer
from workers.models import compat
from workers.options.optimization_levels import OptimizationLevel

MIN_WARMUP_BLOCKS, MAX_WARMUP_S, WARMUP_TOLERANCE = 5, 2.0, 0.02
PART_S, PARTS, MAX_CALLS = 5e-3, 5, 10_000
SLOW_S = 0.1
OVERHEAD_SHARE = 1e-3
COLD_TIMES_CACHE, MAX_COLD_BYTES = 3, 2 << 30
LEARNING_RATE = 1e-4
O2 = OptimizationLevel.O2


class Unsupported(Exception):
    """This device cannot run the case with these settings; the text is the reason."""


@dataclass(frozen=True, slots=True)
class CaseSettings:
    """Settings of one measurement: `precision` is fp32, bf16 or fp16, `regime` hot or cold, `kernels` the name of a
    kernel back end, or "". `backward`: only the gradients of an operation are measured."""

    case: str
    precision: str = "fp32"
    level: str = "O1"
    regime: str = "hot"
    train: bool = False
    depth: float = 1.0
    roundings: float = 1.0
    flops: float = 0.0
    is_model: bool = False
    kernels: str = ""
    backward: bool = False


@dataclass(slots=True)
class PreparedCase:
    """A case ready to be timed. A block is `parts` parts of `calls` calls of `call`.

    `facts` are the results of preparing it; `end` releases resources other than memory. `check`, after the last block,
    raises UserError if the calls were not all of the same values. `timer` None means the session's timer. `refill`
    prepares the inputs that the calls of a part consume, and is not timed."""

    call: Callable[[], Any]
    calls: int = 1
    parts: int = 1
    facts: dict[str, Any] = field(default_factory=dict)
    end: Callable[[], None] = lambda: None
    check: Callable[[], None] = lambda: None
    timer: Timer | None = None
    refill: Refill = None


def prepare_case(
    settings: CaseSettings, built: BuiltCase, backend: BaseBackend, timer: Timer, cache_bytes: int
) -> PreparedCase:
    """Prepare one case. Raises Unsupported with the reason, and any exception of the workload."""
    dtype = precision_of(settings.precision)
    if dtype != torch.float32 and not supports_dtype(backend, dtype):
        raise Unsupported(f"{backend.device} has no native {name_of(dtype)}")
    if settings.train and not any(p.requires_grad for p in built.module.parameters()):
        raise Unsupported("the model has no parameter to train")
    sample = (built.sample if settings.is_model else reference.round_inputs(built.sample, dtype)).copy()
    expected = reference.compute(built, sample, settings.train, settings.flops)
    facts: dict[str, Any] = {"inputs_sha256": inputs_sha256(sample), "weights_sha256": weights_sha256(built.module)}
    started = perf_counter()
    ready = _prepare(settings, built, sample, backend, dtype)
    facts |= {"prepare_s": perf_counter() - started, "applied": ready.applied, "skipped": ready.skipped}
    synchronize = ready.synchronize or backend.synchronize
    repetition = RepeatedCall(ready.run, ready.inputs, ready.forward, ready.to_host if settings.kernels else None)
    synchronize()
    first_started = perf_counter()
    first = repetition.first()
    synchronize()
    facts["first_call_s"] = perf_counter() - first_started
    facts["accuracy"] = _check_accuracy(settings, ready, first, expected, dtype)
    del first

    def second(call: Callable[[], Any]) -> None:
        def once() -> None:
            call()
            synchronize()

        facts["peak_memory_bytes"] = backend.peak_of(once)
        if facts["peak_memory_bytes"] is None:  # peak_of did not call it
            once()

    facts |= repetition.detect_changes(second)
    call = repetition.call
    if settings.regime == "cold":
        call = _cold_call(settings, ready, repetition, cache_bytes)
    own_timer = None if ready.synchronize is None else timer.by_host(ready.synchronize)
    facts |= {"timer": own_timer.name} if own_timer else {}
    prepared = warmed_up(call, own_timer or timer, facts, repetition.refill, repetition.max_calls or MAX_CALLS)
    prepared.timer, prepared.check = own_timer, repetition.check_unchanged
    return prepared


def warmed_up(
    call: Callable[[], Any], timer: Timer, facts: dict[str, Any], refill: Refill = None, max_calls: int = MAX_CALLS
) -> PreparedCase:
    """Warm up `call` and choose the size of its blocks, with at most `max_calls` calls per part."""
    warmup_calls, call_s = warm_up(call, timer, refill)
    calls, parts = block_shape(call_s, timer.overhead_s)
    calls = min(calls, max_calls)
    sizes = {"warmup_calls": warmup_calls, "warm_call_s": call_s, "calls_per_part": calls, "parts": parts}
    return PreparedCase(call, calls, parts, facts | sizes, refill=refill)


def warm_up(call: Callable[[], Any], timer: Timer, refill: Refill = None) -> tuple[int, float]:
    """Call until the median of five blocks changes by at most 2 %. Return (calls, seconds per call).

    Takes at most 2 s, or the user's time limit for a case if that is shorter.
    """
    times_s: list[float] = []
    max_s = min(MAX_WARMUP_S, timer.case_s)
    started, before = perf_counter(), float("inf")
    while len(times_s) < 1_000_000:
        times_s.append(timer.block(call, 1, refill=refill).call_s)
        now = median(times_s[-5:])
        steady = len(times_s) >= MIN_WARMUP_BLOCKS and abs(now - before) <= WARMUP_TOLERANCE * now
        if steady or (len(times_s) >= 3 and perf_counter() - started > max_s):
            break
        before = now
    return len(times_s), median(times_s[-5:])


def block_shape(call_s: float, overhead_s: float) -> tuple[int, int]:
    """Return (calls per part, parts per block).

    A part takes at least 5 ms and 1000 times the clock's own cost. A slow call is a part by itself, and a call of 0.1 s
    or more is a block.
    """
    part_s = max(PART_S, overhead_s / OVERHEAD_SHARE)
    calls = max(1, min(round(part_s / max(call_s, 1e-9)), MAX_CALLS))
    return calls, PARTS if calls * call_s < 2 * PART_S else 3 if call_s < SLOW_S else 1


@dataclass(slots=True)
class _DeviceCase:
    """A case on its device. `run` makes one call with the inputs passed to it; `forward` is the model, None for
    training.

    `synchronize` and `to_host` belong to kernels whose results are outside torch.
    """

    run: Callable[[Sample], Any]
    inputs: Sample
    applied: list[str]
    skipped: dict[str, str]
    forward: Any = None
    parameters: tuple[Tensor, ...] = ()
    synchronize: Callable[[], None] | None = None
    to_host: Callable[[Any], Tensor] = first_tensor


def _prepare(
    settings: CaseSettings, built: BuiltCase, sample: Sample, backend: BaseBackend, dtype: torch.dtype
) -> _DeviceCase:
    if settings.backward:
        return _backward(settings, built, sample, backend, dtype)
    if not settings.kernels:
        return (_training if settings.train else _forward)(settings, built, sample, backend, dtype)
    from workers.benchmark import kernel_measurement

    kernels = kernel_measurement.create_kernels(settings, backend, dtype)
    call, inputs = kernel_measurement.make_forward(settings, sample, kernels)
    synchronize = None if settings.kernels == "torch" else kernels.synchronize
    return _DeviceCase(call, inputs, [f"kernels: {settings.kernels}"], {}, None, (), synchronize, kernels.to_host)


def _forward(
    settings: CaseSettings, built: BuiltCase, sample: Sample, backend: BaseBackend, dtype: torch.dtype
) -> _DeviceCase:
    model_dtype = dtype if settings.is_model else torch.float32  # an operation's inputs already have the precision
    prepared = _unsupported_on_user_error(
        lambda: compat.prepare(backend, built.module.eval(), settings.level, sample.copy(), model_dtype)
    )
    _require_compiled(settings, prepared.skipped)
    inputs = backend.to_device(sample)

    def with_inputs(call_inputs: Sample) -> Any:
        with torch.no_grad():
            return prepared.model(*call_inputs.args, **call_inputs.kwargs)

    return _DeviceCase(with_inputs, inputs, prepared.applied, prepared.skipped, prepared.model)


def _backward(
    settings: CaseSettings, built: BuiltCase, sample: Sample, backend: BaseBackend, dtype: torch.dtype
) -> _DeviceCase:
    """Prepare the gradients of an operation, after one forward. torch's kernels are those that autograd calls."""
    from workers.benchmark import kernel_measurement

    if OptimizationLevel.from_string(settings.level) >= O2:
        raise Unsupported(f"a backward alone is measured at O0 and O1 only: {settings.level} compiles the model")
    inputs, synchronize = backend.to_device(sample), None
    applied = [f"kernels: {settings.kernels}" if settings.kernels else "placement"]
    if settings.kernels in ("", "torch"):
        assert isinstance(built.module, Gradients)
        gradients: Callable[[Tensor], Any] = built.module.prepare(*inputs.args[1:])
    else:
        kernels = kernel_measurement.create_kernels(settings, backend, dtype)
        gradients, synchronize = kernel_measurement.make_backward(settings, inputs, kernels), kernels.synchronize
    return _DeviceCase(
        lambda call_inputs: gradients(call_inputs.args[0]),
        inputs,
        applied,
        {},
        synchronize=synchronize,
        to_host=flatten,
    )


def _training(
    settings: CaseSettings, built: BuiltCase, sample: Sample, backend: BaseBackend, dtype: torch.dtype
) -> _DeviceCase:
    """Prepare a training step: forward, loss, backward and a step of plain SGD."""
    model = built.module.train()
    sgd = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    prepared = _unsupported_on_user_error(
        lambda: compat.prepare_training(backend, model, sgd, dtype, settings.level, sample.copy())
    )
    _require_compiled(settings, prepared.skipped)
    inputs, optimizer = backend.to_device(sample), prepared.optimizer
    assert optimizer is not None

    def step(call_inputs: Sample) -> Tensor:
        optimizer.zero_grad()
        loss = built.loss(prepared.model(*call_inputs.args, **call_inputs.kwargs))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    trained = tuple(p for group in optimizer.param_groups for p in group["params"])
    return _DeviceCase(step, inputs, prepared.applied, prepared.skipped, parameters=trained)


def _unsupported_on_user_error(prepare: Callable[[], Any]) -> Any:
    """Convert a back end's UserError to Unsupported. Any other exception is a failure of the measurement."""
    try:
        return prepare()
    except UserError as e:
        raise Unsupported(e.message) from e


def _require_compiled(settings: CaseSettings, skipped: dict[str, str]) -> None:
    """Raise Unsupported if the level had no effect, so that it is not measured under its name."""
    if OptimizationLevel.from_string(settings.level) >= O2 and "compile" in skipped:
        raise Unsupported(f"{settings.level} had no effect here: {skipped['compile']}")


def _check_accuracy(
    settings: CaseSettings, ready: _DeviceCase, first: Any, expected: reference.ReferenceResult, dtype: torch.dtype
) -> dict[str, Any]:
    """Measure the errors of the first call's output, or of its gradients."""
    if expected.output is None:
        return {"ok": None, "reason": f"not checked: {expected.reason}"}
    times = 3 if settings.train else 1  # backward and the step follow the forward
    rounding = accuracy.Rounding(dtype, times * settings.depth, times * settings.roundings)
    if settings.backward:
        result = _check_each_gradient(first, expected.output, rounding)
    elif not settings.train:
        result = accuracy.measure(ready.to_host(first), expected.output, rounding)
    else:
        result = _check_gradients(ready.parameters, expected, rounding)
        result["loss"], result["loss_reference"] = float(first.detach().cpu()), float(expected.output)
    return result | {"reference": f"cpu {expected.dtype}"}


def _check_each_gradient(first: Any, expected: Tensor, rounding: accuracy.Rounding) -> dict[str, Any]:
    """Compare each gradient at its own scale: those of weights are sums over all rows. Return the worst."""
    actual = [flatten(one) for one in gradients_in(first)]
    parts = torch.split(expected, [len(one) for one in actual])
    results = [accuracy.measure(one, part, rounding) for one, part in zip(actual, parts, strict=True)]
    return max(results, key=lambda one: (not one["ok"], one.get("scaled", 0.0))) | {"of": "gradients"}


def _check_gradients(
    parameters: tuple[Tensor, ...], expected: reference.ReferenceResult, rounding: accuracy.Rounding
) -> dict[str, Any]:
    """Compare all gradients as one vector, each scaled by its own size, or by a thousandth of the largest if that is
    more: the gradient of a bias without effect is only noise."""
    actual = [(torch.zeros_like(p) if p.grad is None else p.grad).detach().cpu().double() for p in parameters]
    sizes = [float(w.double().square().mean().sqrt()) for w in expected.gradients]
    sizes = [max(size, max(sizes) / 1e3) or 1.0 for size in sizes]
    flat = [torch.cat([(t.double() / size).reshape(-1) for t, size in zip(side, sizes, strict=True)])
            for side in (actual, expected.gradients)]  # fmt: skip
    return accuracy.measure(flat[0], flat[1], rounding, normwise=True) | {"of": "gradients"}


def _cold_call(
    settings: CaseSettings, ready: _DeviceCase, repetition: RepeatedCall, cache_bytes: int
) -> Callable[[], Any]:
    """Return a call that cycles through so many copies of its inputs that each leaves the cache before its next use."""
    if settings.train:
        raise Unsupported("a training step reads its weights anyway: only hot caches are measured")
    if repetition.refill is not None:
        raise Unsupported(
            "it changes its inputs in place, and restoring them warms the cache: only hot caches are measured"
        )
    run, inputs = ready.run, ready.inputs
    size_bytes = sum(t.nbytes for t in tensors_of(inputs))
    if not size_bytes:
        raise Unsupported("its inputs are in a driver's own memory: only hot caches are measured")
    copies = max(2, -(-COLD_TIMES_CACHE * cache_bytes // max(size_bytes, 1)) + 1)
    if copies * size_bytes > MAX_COLD_BYTES:
        copies = max(2, MAX_COLD_BYTES // max(size_bytes, 1))
    next_inputs = itertools.cycle([inputs, *(inputs.copy() for _ in range(copies - 1))])
    return lambda: run(next(next_inputs))
