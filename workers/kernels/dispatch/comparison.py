"""Measure implementations against torch's own operations, and store whether they are correct and how fast."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cluster.errors import PolyfleetError, UserError, nearest
from workers import kernels as registry
from workers.devices.backends import device_facts
from workers.devices.backends.precision import name_of
from workers.kernels.dispatch import operators
from workers.kernels.dispatch.classes import shape_class
from workers.kernels.dispatch.fastest import backend_of, torch_variants
from workers.kernels.dispatch.probes import Arguments, Probe, operations, probes
from workers.kernels.dispatch.tuner import BASE, REFERENCE, KernelMeasurement, Situation, software_of, store_measurement
from workers.measurement import accuracy
from workers.measurement.fingerprint import tensor_digest
from workers.measurement.timing import Timer
from workers.measurement.timing_comparison import compare_timings

ROUNDS = 9
GRADIENT_ROUNDINGS = 2.0
"""Further roundings in a gradient: of the forward's result, and of the result's gradient."""
ResultCallback = Callable[[KernelMeasurement], None]
Call = Callable[..., Any]
Check = Callable[[Any, Probe, Arguments], bool]
OWN_IN_REVERSE = frozenset({"apply_rope"})
"""Operations whose gradient every implementation computes with its forward's kernel."""


def tune(
    selected: Sequence[str] = (),
    kernels: Sequence[str] = (),
    device: Any = "cpu",
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    compiled: bool = True,
    rounds: int = ROUNDS,
    on_result: ResultCallback = lambda one: None,
) -> list[KernelMeasurement]:
    """Measure operations (default: all) with `kernels` (default: all that compute on `device` and are not interpreted).

    Each is measured in several sizes, forward and backward, and, if `compiled`, inside torch.compile. Results and
    gradients are checked against float64 first: wrong ones are stored as wrong and not timed. torch and the kernels are
    timed alternately with the device's clock.

    Discards everything torch.compile has compiled in this process, so call it in a separate process. Raises UserError
    for unknown names, KernelsUnavailable for named kernels that cannot compute here.
    """
    _check_operations(selected)
    base = registry.create(BASE, device)
    cases = [
        (operation, dtype, probe)
        for operation in selected or operations()
        for dtype in dtypes
        for probe in probes(operation, base.device)
    ]
    implementations = _candidates(kernels, base.device)
    return measure([(probe, dtype) for _, dtype, probe in cases], implementations, base.device, compiled=compiled,
                   rounds=rounds, on_result=on_result)  # fmt: skip


def measure(
    cases: Sequence[tuple[Probe, torch.dtype]],
    kernels: Sequence[Any],
    device: torch.device,
    *,
    compiled: bool = False,
    rounds: int = ROUNDS,
    on_result: ResultCallback = lambda one: None,
) -> list[KernelMeasurement]:
    """Measure each of `kernels` on each probe, as `tune` does."""
    backend = backend_of(device)
    timer, kind = Timer(backend), device_facts.kind(backend)
    measured = []
    for one in kernels:
        software = software_of(one)
        for probe, dtype in cases:
            if one.supports(dtype) and one.differs_in in ("", probe.operation):
                for result in _ProbeMeasurement(one, probe, dtype, kind, software, timer, rounds).results(compiled):
                    store_measurement(result)
                    on_result(result)
                    measured.append(result)
    return measured


def _check_operations(names: Sequence[str]) -> None:
    for name in names:
        if name not in operations():
            raise UserError(f"unknown operation {name!r}", nearest(name, operations()))


def _candidates(names: Sequence[str], device: torch.device) -> list[Any]:
    """Create the named kernels, raising if one cannot be measured; without names, all that can be measured."""
    implementations = []
    every_name = (*(n for n in registry.names() if n not in (BASE, REFERENCE)), *torch_variants(device))
    for name in names or every_name:
        try:
            implementation = registry.create(name, device)
        except PolyfleetError:
            if names:
                raise
            continue
        if implementation.interpreted and names:
            raise UserError(
                f"kernels {name!r} are interpreted here",
                "run it on a device: the speed of an interpreter is meaningless",
            )
        if not implementation.interpreted:
            implementations.append(implementation)
    return implementations


@dataclass(frozen=True, slots=True)
class _ProbeMeasurement:
    """Measurements of one implementation with one probe in one dtype."""

    kernels: Any
    probe: Probe
    dtype: torch.dtype
    kind: str
    software: str
    timer: Timer
    rounds: int

    def results(self, compiled: bool) -> Iterator[KernelMeasurement]:
        """Measure forward, its own backward if it has one, and inside torch.compile if it is faster outside."""
        forward = self.measure(_forward, check=_is_correct)
        yield forward
        if forward.right and self.probe.operation in self.kernels.own_gradients | OWN_IN_REVERSE:
            yield self.measure(_backward, gradient=True, check=_are_gradients_correct)
        if compiled and forward.low > 1 and self.probe.operation in _OPERATORS:
            torch.compiler.reset()
            yield self.measure(_inside_compile, inside=True)

    def measure(
        self,
        make: Callable[..., tuple[Call, Call]],
        *,
        gradient: bool = False,
        inside: bool = False,
        check: Check | None = None,
    ) -> KernelMeasurement:
        """Time one comparison. An implementation that overwrites its arguments is wrong."""
        shapes = (*self.probe.shapes, ())
        situation = Situation(
            self.kind, self.probe.operation, name_of(self.dtype), shape_class(self.probe.operation, *shapes[:2]),
            gradient, inside,
        )  # fmt: skip
        wrong = KernelMeasurement(situation, self.kernels.name, self.software, 0.0, 0.0, 0.0, right=False)
        try:
            arguments = self.probe.arguments(self.dtype, self.kernels.device)
            before = [tensor_digest(one) for one in arguments]
            baseline, candidate = make(self.kernels, self.probe, arguments)
            if check and not check(candidate(), self.probe, arguments):
                return wrong
            ratio = compare_timings(baseline, candidate, self.timer, self.rounds).ratio
            if before != [tensor_digest(one) for one in arguments]:
                return wrong
        except PolyfleetError:
            return wrong
        median, low, high = (round(value, 4) for value in ratio)
        return KernelMeasurement(situation, self.kernels.name, self.software, median, low, high)


def _forward(kernels: Any, probe: Probe, arguments: Arguments) -> tuple[Call, Call]:
    method, options = getattr(kernels, probe.operation), probe.options

    def plain() -> Any:
        with torch.no_grad():
            return probe.plain(*arguments)

    return plain, lambda: method(*arguments, **options)


def _backward(kernels: Any, probe: Probe, arguments: Arguments) -> tuple[Call, Call]:
    """Return functions that compute only the gradients, from a forward that has already been computed."""
    learning = _learning(probe, arguments)
    result, inputs = probe.plain(*learning), [one for one in learning if one.requires_grad]
    grad = _result_gradient(result.shape, result.dtype).to(result.device)

    def plain() -> Any:
        return torch.autograd.grad(result, inputs, grad, retain_graph=True)

    if kernels.differs_in == "attention":
        return _training_with_variant(kernels.name, probe, learning, grad)
    method, options = getattr(kernels, f"{probe.operation}_backward"), probe.options
    first: Any = arguments
    if probe.operation == "softmax":
        first = (result.detach(),)
    elif probe.operation == "apply_rope":
        first = arguments[1:]
    elif probe.operation == "attention":
        first = (*arguments, *kernels.attention(*arguments, **options, return_lse=True))
    return plain, lambda: method(grad, *first, **options)


def _training_with_variant(name: str, probe: Probe, learning: Arguments, grad: Tensor) -> tuple[Call, Call]:
    """Return functions that compute attention and its gradients, which one of torch's kernels must compute together."""

    def plain() -> Any:
        return torch.autograd.grad(probe.plain(*learning), learning, grad)

    def variant() -> Any:
        return torch.autograd.grad(operators.attention(*learning, **probe.options, kernels=name), learning, grad)

    return plain, variant


def _learning(probe: Probe, tensors: Arguments) -> Arguments:
    """Return the tensors with gradients; the tables of apply_rope have none."""
    count = 1 if probe.operation == "apply_rope" else len(tensors)
    return tuple(one.detach().requires_grad_(number < count) for number, one in enumerate(tensors))


def _result_gradient(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def _inside_compile(kernels: Any, probe: Probe, arguments: Arguments) -> tuple[Call, Call]:
    """Return compiled functions, with operations around that torch could fuse: a residual before, a product after."""
    operator, options = _OPERATORS[probe.operation], probe.options

    def block(compute: Call) -> Call:
        def run(residual: Tensor, *tensors: Tensor) -> Any:
            return compute(tensors[0] + residual, *tensors[1:]) * 2

        ready = torch.compile(run, fullgraph=True)
        residual = torch.ones_like(arguments[0])

        def call() -> Any:
            with torch.no_grad():
                return ready(residual, *arguments)

        return call

    def ours(*tensors: Tensor) -> Tensor:
        output: Tensor = operator(*tensors, **options, kernels=kernels.name)
        return output

    return block(probe.plain), block(ours)


def _is_correct(actual: Tensor, probe: Probe, arguments: Arguments) -> bool:
    """Return whether a result agrees with float64 within the tolerance of its dtype."""
    reference = registry.create(REFERENCE)
    wide = tuple(one.cpu().double() for one in arguments)
    expected = getattr(reference, probe.operation)(*wide, **probe.options)
    rounding = accuracy.Rounding(actual.dtype, probe.depth, probe.roundings)
    return bool(accuracy.measure(actual.cpu(), expected.to(actual.dtype), rounding)["ok"])


def _are_gradients_correct(actual: Any, probe: Probe, arguments: Arguments) -> bool:
    """Return whether gradients agree with those of autograd in float64, where sums over rows may be the longest."""
    learning = _learning(probe, tuple(one.cpu().double() for one in arguments))
    result, dtype = probe.plain(*learning), arguments[0].dtype
    grad = _result_gradient(result.shape, dtype).double()
    expected = torch.autograd.grad(result, [one for one in learning if one.requires_grad], grad)
    depth = max(probe.depth, probe.shapes[0][-2])
    rounding = accuracy.Rounding(dtype, depth, probe.roundings + GRADIENT_ROUNDINGS)
    return all(
        accuracy.measure(one.cpu(), want.to(one.dtype), rounding)["ok"]
        for one, want in zip(actual if isinstance(actual, tuple) else (actual,), expected, strict=True)
    )


_OPERATORS: dict[str, Call] = {
    name: getattr(operators, name)
    for name in ("rmsnorm", "layernorm", "softmax", "silu", "swiglu", "apply_rope", "matmul", "attention")
}
