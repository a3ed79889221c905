"""An arm: one cell made ready on one device. Everything that must not be in a timed block happens here, once."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from cluster.errors import UserError
from workers.backends.base import BaseBackend
from workers.backends.parts.device_transfer import tensors_of
from workers.backends.parts.precision import name_of, precision_of
from workers.benchmark import accuracy, reference
from workers.benchmark.case_builder import Built
from workers.benchmark.repeated_call import Repetition
from workers.benchmark.timing import Refill, Timer
from workers.optimization_levels import OptimizationLevel
from workers.optimizers.fingerprint import inputs_sha256, weights_sha256
from workers.optimizers.output_difference import first_tensor
from workers.optimizers.pass_context import Sample

WARMUP_LEAST, WARMUP_MOST_S, WARMUP_STEADY = 5, 2.0, 0.02
PART_S, PARTS, MOST_CALLS = 5e-3, 5, 10_000
SLOW_S = 0.1
OVERHEAD_SHARE = 1e-3
COLD_TIMES_CACHE, COLD_MOST_BYTES = 3, 2 << 30
LEARNING_RATE = 1e-4
O2 = OptimizationLevel.O2


class Unsupported(Exception):
    """This device cannot do this cell; the text is the reason."""


@dataclass(frozen=True, slots=True)
class CaseSettings:
    """What an arm measures: `precision` fp32, bf16 or fp16, `regime` hot or cold, `kernels` an implementation of the
    operation."""

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


@dataclass(slots=True)
class PreparedCase:
    """`call` is what is timed; `parts` times `calls` of it make a block. `facts` are what opening found out; `end` lets
    go of what it holds beside memory. `timer` is None where the session's is right. `refill` makes ready what the calls
    of a part use up, and is not timed."""

    call: Callable[[], Any]
    calls: int = 1
    parts: int = 1
    facts: dict[str, Any] = field(default_factory=dict)
    end: Callable[[], None] = lambda: None
    timer: Timer | None = None
    refill: Refill = None


def prepare_case(
    cell: CaseSettings, built: Built, backend: BaseBackend, timer: Timer, cache_bytes: int
) -> PreparedCase:
    """Raises Unsupported with the reason, and whatever the workload raises."""
    dtype = precision_of(cell.precision)
    if dtype != torch.float32 and not backend.supports_dtype(dtype):
        raise Unsupported(f"{backend.device} has no native {name_of(dtype)}")
    if cell.train and not any(p.requires_grad for p in built.module.parameters()):
        raise Unsupported("the model has no parameter to train")
    sample = (built.sample if cell.is_model else reference.rounded(built.sample, dtype)).copy()
    want = reference.compute(built, sample, cell.train, cell.flops)
    facts: dict[str, Any] = {"inputs_sha256": inputs_sha256(sample), "weights_sha256": weights_sha256(built.module)}
    started = perf_counter()
    ready = _prepared(cell, built, sample, backend, dtype)
    facts |= {"prepare_s": perf_counter() - started, "applied": ready.applied, "skipped": ready.skipped}
    synchronize = ready.synchronize or backend.synchronize
    repetition = Repetition(ready.run, ready.inputs, ready.forward, ready.to_host if cell.kernels else None)
    synchronize()
    begun = perf_counter()
    first = repetition.first()
    synchronize()
    facts["first_call_s"] = perf_counter() - begun
    facts["accuracy"] = _checked(cell, ready, first, want, dtype)
    del first

    def second(call: Callable[[], Any]) -> None:
        def once() -> None:
            call()
            synchronize()

        facts["peak_memory_bytes"] = backend.peak_of(once)
        if facts["peak_memory_bytes"] is None:  # then it was not called
            once()

    facts |= repetition.settle(second)
    call = repetition.call
    if cell.regime == "cold":
        call = _cold(cell, ready, repetition, cache_bytes)
    own = None if ready.synchronize is None else timer.by_host(ready.synchronize)
    facts |= {"timer": own.name} if own else {}
    opened = warmed_up(call, own or timer, facts, repetition.refill, repetition.max_calls or MOST_CALLS)
    opened.timer = own
    return opened


def warmed_up(
    call: Callable[[], Any], timer: Timer, facts: dict[str, Any], refill: Refill = None, max_calls: int = MOST_CALLS
) -> PreparedCase:
    """`call` warmed up, as an arm of blocks of the right size, with at most `max_calls` in a part."""
    warmup_calls, call_s = warm_up(call, timer, refill)
    calls, parts = block_shape(call_s, timer.overhead_s)
    calls = min(calls, max_calls)
    sizes = {"warmup_calls": warmup_calls, "warm_call_s": call_s, "calls_per_part": calls, "parts": parts}
    return PreparedCase(call, calls, parts, facts | sizes, refill=refill)


def warm_up(call: Callable[[], Any], timer: Timer, refill: Refill = None) -> tuple[int, float]:
    """(calls, seconds per call): until the median of five blocks moves less than 2 %, for at most two seconds, or what
    the user gives the case.
    """
    taken: list[float] = []
    most_s = min(WARMUP_MOST_S, timer.case_s)
    begun, before = perf_counter(), float("inf")
    while len(taken) < 1_000_000:
        taken.append(timer.block(call, 1, refill=refill).call_s)
        now = median(taken[-5:])
        steady = len(taken) >= WARMUP_LEAST and abs(now - before) <= WARMUP_STEADY * now
        if steady or (len(taken) >= 3 and perf_counter() - begun > most_s):
            break
        before = now
    return len(taken), median(taken[-5:])


def block_shape(call_s: float, overhead_s: float) -> tuple[int, int]:
    """(calls of a part, parts of a block). A part takes 5 ms, and so long that the clock's own cost is below a
    thousandth of it; slow calls make a part each, and the slowest a block.
    """
    wanted_s = max(PART_S, overhead_s / OVERHEAD_SHARE)
    calls = max(1, min(round(wanted_s / max(call_s, 1e-9)), MOST_CALLS))
    return calls, PARTS if calls * call_s < 2 * PART_S else 3 if call_s < SLOW_S else 1


@dataclass(slots=True)
class _Ready:
    """`run` is one call with given inputs. `forward` is the model of a forward. `synchronize` and `to_host` are those
    of kernels whose results torch does not know of.
    """

    run: Callable[[Sample], Any]
    inputs: Sample
    applied: list[str]
    skipped: dict[str, str]
    forward: Any = None
    parameters: tuple[Tensor, ...] = ()
    synchronize: Callable[[], None] | None = None
    to_host: Callable[[Any], Tensor] = first_tensor


def _prepared(cell: CaseSettings, built: Built, sample: Sample, backend: BaseBackend, dtype: torch.dtype) -> _Ready:
    if not cell.kernels:
        return (_training if cell.train else _forward)(cell, built, sample, backend, dtype)
    from workers.benchmark import kernel_measurement

    kernels = kernel_measurement.opened(cell, backend, dtype)
    call, inputs = kernel_measurement.forward(cell, sample, kernels)
    synchronize = None if cell.kernels == "torch" else kernels.synchronize
    return _Ready(call, inputs, [f"kernels: {cell.kernels}"], {}, None, (), synchronize, kernels.to_host)


def _forward(cell: CaseSettings, built: Built, sample: Sample, backend: BaseBackend, dtype: torch.dtype) -> _Ready:
    asked = dtype if cell.is_model else torch.float32  # an operation's inputs have the precision already
    prepared = _supported(lambda: backend.prepare(built.module.eval(), cell.level, sample.copy(), asked))
    _require_compiled(cell, prepared.skipped)
    inputs = backend.to_device(sample)

    def with_inputs(given: Sample) -> Any:
        with torch.no_grad():
            return prepared.model(*given.args, **given.kwargs)

    return _Ready(with_inputs, inputs, prepared.applied, prepared.skipped, prepared.model)


def _training(cell: CaseSettings, built: Built, sample: Sample, backend: BaseBackend, dtype: torch.dtype) -> _Ready:
    """Forward, loss, backward and a step of plain SGD."""
    model = built.module.train()
    sgd = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    done = _supported(lambda: backend.prepare_training(model, sgd, dtype, cell.level, sample.copy()))
    _require_compiled(cell, done.skipped)
    inputs, optimizer = backend.to_device(sample), done.optimizer
    assert optimizer is not None

    def step(given: Sample) -> Tensor:
        optimizer.zero_grad()
        loss = built.loss(done.model(*given.args, **given.kwargs))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    trained = tuple(p for group in optimizer.param_groups for p in group["params"])
    return _Ready(step, inputs, done.applied, done.skipped, parameters=trained)


def _supported(prepare: Callable[[], Any]) -> Any:
    """What a back end refuses on purpose is not supported; anything else is a failure of the cell."""
    try:
        return prepare()
    except UserError as e:
        raise Unsupported(e.message) from e


def _require_compiled(cell: CaseSettings, skipped: dict[str, str]) -> None:
    """A level that did not take effect is not measured under its name."""
    if OptimizationLevel.from_string(cell.level) >= O2 and "compile" in skipped:
        raise Unsupported(f"{cell.level} took no effect here: {skipped['compile']}")


def _checked(
    cell: CaseSettings, ready: _Ready, first: Any, want: reference.ReferenceResult, dtype: torch.dtype
) -> dict[str, Any]:
    """Errors of the first call's output, or of its loss and gradients."""
    if want.output is None:
        return {"ok": None, "reason": f"not checked: {want.why_not}"}
    times = 3 if cell.train else 1  # the backward and the step come after the forward
    rounding = accuracy.Rounding(dtype, times * cell.depth, times * cell.roundings)
    if not cell.train:
        told = accuracy.measure(ready.to_host(first), want.output, rounding)
    else:
        told = _checked_gradients(ready.parameters, want, rounding)
        told["loss"], told["loss_reference"] = float(first.detach().cpu()), float(want.output)
    return told | {"reference": f"cpu {want.dtype}"}


def _checked_gradients(
    parameters: tuple[Tensor, ...], want: reference.ReferenceResult, rounding: accuracy.Rounding
) -> dict[str, Any]:
    """All gradients, each in units of its own size, as one vector. One below a thousandth of the largest counts as if
    it had that size: the gradient of a bias that changes nothing is noise."""
    have = [(torch.zeros_like(p) if p.grad is None else p.grad).detach().cpu().double() for p in parameters]
    sizes = [float(w.double().square().mean().sqrt()) for w in want.gradients]
    sizes = [max(size, max(sizes) / 1e3) or 1.0 for size in sizes]
    flat = [torch.cat([(t.double() / size).reshape(-1) for t, size in zip(side, sizes, strict=True)])
            for side in (have, want.gradients)]  # fmt: skip
    return accuracy.measure(flat[0], flat[1], rounding, normwise=True) | {"of": "gradients"}


def _cold(cell: CaseSettings, ready: _Ready, repetition: Repetition, cache_bytes: int) -> Callable[[], Any]:
    """The call over copies of its inputs in turns, so many that a cache forgot each before it comes again."""
    if cell.train:
        raise Unsupported("a training step reads its weights anyway: only hot is measured")
    if repetition.refill is not None:
        raise Unsupported("it changes its inputs in place, and restoring them warms the cache: only hot is measured")
    run, inputs = ready.run, ready.inputs
    size_bytes = sum(t.nbytes for t in tensors_of(inputs))
    if not size_bytes:
        raise Unsupported("its inputs lie in a driver's own memory: only hot is measured")
    copies = max(2, -(-COLD_TIMES_CACHE * cache_bytes // max(size_bytes, 1)) + 1)
    if copies * size_bytes > COLD_MOST_BYTES:
        copies = max(2, COLD_MOST_BYTES // max(size_bytes, 1))
    turns = itertools.cycle([inputs, *(inputs.copy() for _ in range(copies - 1))])
    return lambda: run(next(turns))
