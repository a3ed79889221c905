"""The optimiser: try every pass of a level on the sample input, and measure the model with and without it.

A pass is accepted only if the result stays correct and does not become slower.
"""

from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cluster.errors import UserError
from workers.devices.backends import device_facts, device_transfer
from workers.devices.backends.dtype_checks import require_dtype, supports_dtype
from workers.devices.backends.precision import precision_of
from workers.measurement.inputs import Inputs, Sample, as_sample
from workers.measurement.output_difference import largest_difference
from workers.measurement.timing import Timer
from workers.measurement.timing_comparison import TimingComparison, compare_timings
from workers.models.optimizers import passes, result, trial
from workers.models.optimizers.preparation import mark, move_to_device
from workers.models.optimizers.result import OptimizationResult, OptimizationStrategy
from workers.models.passes.pass_context import PassContext, SkipPass, deep_copy
from workers.options.config import compile_mode_of
from workers.options.optimization_levels import OptimizationLevel

if TYPE_CHECKING:
    from workers.devices.backends.base import BaseBackend
    from workers.options.config import PolyfleetConfig

# Default tolerance: maximum difference from the float32 model, relative to its largest value. It covers rounding in
# that precision; quantised weights have their own limit.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
QUANTIZED = ("int8_weights", "fp8_linear")


def get_optimizer(name: "str | None" = None, config: "PolyfleetConfig | None" = None) -> "ModelOptimizer":
    """Return the optimiser of a back end by name (None: the best of this machine). Raises as `get_backend` does."""
    from workers.devices.selection.factory import get_backend

    return ModelOptimizer(get_backend(name, config))


def get_available_strategies(name: "str | None" = None) -> list[OptimizationStrategy]:
    """List every pass, with its measured speed-up on this machine's devices of that back end."""
    return get_optimizer(name).get_available_strategies()


class ModelOptimizer:
    """Optimises models for one device."""

    def __init__(self, backend: "BaseBackend"):
        self.backend = backend

    def get_available_strategies(self) -> list[OptimizationStrategy]:
        measured = result.speedups(device_facts.kind(self.backend))
        return [
            OptimizationStrategy(
                p.name,
                p.description,
                tuple(level.value for level in OptimizationLevel if level >= p.first),
                p.requires,
                measured.get(p.name),
            )
            for p in passes.PASSES
        ]

    def optimize(
        self,
        model: nn.Module,
        level: "str | OptimizationLevel" = OptimizationLevel.O2,
        sample_input: Any = None,
        *,
        dtype: "str | torch.dtype | None" = None,
        tolerance: float | None = None,
        for_training: bool = False,
        memory_bytes: int | None = None,
        inplace: bool = False,
    ) -> tuple[nn.Module, OptimizationResult]:
        """Return (the optimised model on the device, which passes were applied and skipped, with measurements).

        `tolerance` is the maximum error, relative to the largest value of the float32 model's output (in training also
        of each gradient). If it is set and `dtype` is None, a lower precision that the device supports is tried too.
        `memory_bytes` limits the memory of a training step (default: what is free). With `inplace` the caller's module
        itself is moved and changed.

        Raises UserError, without any change, for an object that cannot be optimised.
        """
        chosen = OptimizationLevel.from_string(level)
        _require_number("tolerance", tolerance, 1, "write a relative error of at least 0 and below 1")
        _require_number("memory_bytes", memory_bytes, float("inf"), "write the bytes that a training step may use")
        context = self._make_context(model, sample_input, dtype, tolerance, for_training, memory_bytes)
        if context.sample is None:
            return self._optimize_unmeasured(model, chosen, context, inplace)
        with self.backend:
            trials = _Trials(model, context, tolerance).run(chosen)
            final = trials.build(model) if inplace else trials.current
            return final, trials.result(final, chosen)

    def _make_context(
        self,
        model: nn.Module,
        sample_input: Any,
        dtype: Any,
        tolerance: float | None,
        training: bool,
        memory: int | None,
    ) -> PassContext:
        if not isinstance(model, nn.Module):
            raise UserError(
                f"a model must be a torch.nn.Module, not {type(model).__name__}", "return the module itself"
            )
        sample = as_sample(sample_input)
        device_transfer.check_device(sample, self.backend.device)
        target_dtype = precision_of(device_facts.precision(self.backend) if dtype is None else dtype)
        require_dtype(self.backend, target_dtype)
        if dtype is None and target_dtype == torch.float32 and tolerance is not None:
            target_dtype = self._lower_precision()
        inputs: Sample | None = self.backend.to_device(sample)
        return PassContext(self.backend, target_dtype, training, inputs, memory, compile_mode_of(self.backend.config))

    def _lower_precision(self) -> torch.dtype:
        native = [d for d in (torch.bfloat16, torch.float16) if supports_dtype(self.backend, d)]
        return native[0] if native else torch.float32

    def _optimize_unmeasured(
        self, model: nn.Module, level: OptimizationLevel, context: PassContext, inplace: bool
    ) -> tuple[nn.Module, OptimizationResult]:
        own_model = _on_device(model if inplace else deep_copy(model), context)
        prepared = passes.run(own_model, level, context)
        mark(prepared.model, level, prepared.applied)
        warning = "without a sample input nothing was measured or checked"
        return prepared.model, OptimizationResult(
            False, prepared.model, level, prepared.applied, prepared.skipped, [warning]
        )


class _Trials:
    """Trials of passes: those accepted so far, with measurements. A candidate is always built from a fresh copy."""

    def __init__(self, model: nn.Module, context: PassContext, tolerance: float | None):
        self.model, self.pass_context, self.tolerance = model, context, tolerance
        self.accepted: list[passes.Pass] = []
        self.skipped: dict[str, str] = {}
        self.comparisons: dict[str, TimingComparison] = {}
        self.details: dict[str, str] = {}
        self.compile_s = 0.0
        self.warnings: list[str] = []
        self.changes_inputs = False
        self.timer = Timer(context.backend)
        self.kind = device_facts.kind(context.backend)
        self.base = self.build(deep_copy(model))
        self.expected = self._reference()
        actual = self._outcome(self.base)
        self.current, self.error = self.base, largest_difference(actual, self.expected)
        if reason := self._unreliable_reason(actual):
            self.warnings.append(reason)

    def run(self, level: OptimizationLevel) -> "_Trials":
        for one in sorted(passes.passes_for_level(level), key=lambda p: p.first):
            if self.warnings:
                self.skipped[one.name] = "the model's result cannot be checked: see the warnings"
                continue
            try:
                self._try_pass(one)
            except SkipPass as e:
                self.skipped[one.name] = str(e)
        return self

    def build(self, own_model: nn.Module, extra: "passes.Pass | None" = None) -> nn.Module:
        """Apply the accepted passes, and `extra`, to a model that we own. Raises SkipPass if `extra` does not apply."""
        selected = [*self.accepted, *([extra] if extra else [])]
        self.pass_context.details, self.pass_context.compile_mode = (
            {},
            compile_mode_of(self.pass_context.backend.config),
        )
        prepared = passes.apply(_on_device(own_model, self.pass_context), selected, self.pass_context)
        if extra is not None and extra.name in prepared.skipped:
            raise SkipPass(prepared.skipped[extra.name])
        if prepared.skipped:
            raise SkipPass(
                "; ".join(f"{name} fails together with it: {reason}" for name, reason in prepared.skipped.items())
            )
        return prepared.model

    def _try_pass(self, one: passes.Pass) -> None:
        if one.name == "max_autotune" and not any(p.name == "compile" for p in self.accepted):
            raise SkipPass("the pass needs compile, which was not accepted")
        started = perf_counter()
        candidate = self.build(deep_copy(self.model), one)
        actual = self._outcome(candidate)
        built_s = perf_counter() - started
        error = largest_difference(actual, self.expected)
        if reason := trial.not_finite(actual):
            raise SkipPass(f"rolled back: {reason}")
        if not error.max_rel <= (limit := self._limit(one)):
            raise SkipPass(f"rolled back: the error is {error.max_rel:.2g} of the largest value, more than {limit:.2g}")
        comparison = self._compare_times(self.current, candidate)
        self.comparisons[one.name] = comparison
        self._store_speedup(one.name, comparison.ratio.median)
        # A pass that saves memory may cost time: that is its purpose.
        if comparison.slower and one.name != "activation_checkpointing":
            low, high = comparison.ratio.low, comparison.ratio.high
            raise SkipPass(
                f"rolled back: {comparison.ratio.median:.2f} times the speed ({low:.2f} to {high:.2f}) is slower"
            )
        self.accepted.append(one)
        self.details = dict(self.pass_context.details)
        self.current, self.error = candidate, error
        if one.name in ("compile", "max_autotune"):
            self.compile_s += built_s

    def _compare_times(self, first: nn.Module, second: nn.Module) -> TimingComparison:
        """Compare the times of both on the same inputs, or on copies if a call changes them in place."""
        inputs = Inputs(self._sample())
        before, after = (trial.make_call(one, self.pass_context, inputs) for one in (first, second))
        inputs.probe(before, after)
        self.changes_inputs = bool(inputs.changed)
        return compare_timings(before, after, self.timer, inputs=inputs)

    def _limit(self, one: passes.Pass) -> float:
        if self.tolerance is not None:
            return self.tolerance
        lossy = [TOLERANCE[self.pass_context.dtype]] if any(p.name == "autocast" for p in (*self.accepted, one)) else []
        lossy += [5e-2] if any(p.name in QUANTIZED for p in (*self.accepted, one)) else []
        return max([self._own_tolerance(), *lossy])

    def _own_tolerance(self) -> float:
        """Tolerance for the untouched model against its float32 form: its parameters may have a lower precision."""
        dtypes = {p.dtype for p in self.model.parameters()}
        tolerance = max([TOLERANCE[torch.float32], *(TOLERANCE[d] for d in dtypes if d in TOLERANCE)])
        return tolerance if self.tolerance is None else max(self.tolerance, tolerance)

    def _unreliable_reason(self, actual: list[torch.Tensor]) -> str:
        """Return why no pass can be checked on this model, or ""."""
        for values, source in ((self.expected, "of the untouched model"), (actual, "of the model on this device")):
            if reason := trial.not_finite(values):
                return f"{reason} {source}: a change by a pass cannot be detected"
        again = largest_difference(self._outcome(self.base), actual)
        if not again.max_rel <= self._own_tolerance():
            return (
                f"two calls of the untouched model differ by {again.max_rel:.2g} of the largest value: "
                "its output is random, so a change by a pass cannot be detected"
            )
        if not self.error.max_rel <= self._own_tolerance():
            return (
                f"the untouched model differs by {self.error.max_rel:.2g} of the largest value from itself in float32, "
                f"more than {self._own_tolerance():g}"
            )
        return ""

    def _reference(self) -> list[torch.Tensor]:
        """Compute the outcome of the caller's model in float32, without passes, on the same device."""
        plain = _on_device(deep_copy(self.model).float(), self.pass_context)
        sample = self.pass_context.sample
        assert sample is not None
        as_float = device_transfer.map_tensors(sample, lambda t: t.float() if t.is_floating_point() else t)
        exact = PassContext(self.pass_context.backend, torch.float32, self.pass_context.training, as_float)
        return self._outcome(plain, exact)

    def _outcome(self, model: nn.Module, context: PassContext | None = None) -> list[torch.Tensor]:
        try:
            return trial.outcome(model, context or self.pass_context)
        except (RuntimeError, TypeError, ValueError, IndexError) as e:
            lines = str(e).strip().splitlines()
            if model is getattr(self, "base", model) or context is not None:
                raise UserError(f"the model fails on its sample input: {lines[0] if lines else e!r}",
                                "pass an input that the model accepts") from e  # fmt: skip
            raise SkipPass(f"the model fails with this pass: {lines[0] if lines else repr(e)}") from e

    def _sample(self) -> Sample:
        assert self.pass_context.sample is not None
        return self.pass_context.sample

    def _store_speedup(self, name: str, speedup: float) -> None:
        result.record_speedup(self.kind, str(torch.__version__), name, speedup)

    def result(self, final: nn.Module, level: OptimizationLevel) -> OptimizationResult:
        names = [p.name for p in passes.PASSES if p in self.accepted]
        applied = ["placement", *(f"{n}: {self.details[n]}" if n in self.details else n for n in names)]
        mark(final, level, applied)
        overall = self._compare_times(self.base, final)
        metrics = {
            "latency_before_s": list(overall.first_s),
            "latency_after_s": list(overall.second_s),
            "speedup": list(overall.ratio),
            "max_abs_error": self.error.max_abs,
            "max_rel_error": self.error.max_rel,
            "tolerance": max(
                (self._limit(p) for p in self.accepted), default=self.tolerance or TOLERANCE[torch.float32]
            ),
            "model_bytes_before": trial.model_bytes(self.base),
            "model_bytes_after": trial.model_bytes(final),
            **self._peaks(final),
            "compile_s": self.compile_s,
            "passes": {name: list(comparison.ratio) for name, comparison in self.comparisons.items()},
        }
        return OptimizationResult(not self.warnings, final, level, applied, self.skipped, self.warnings, metrics)

    def _peaks(self, final: nn.Module) -> dict[str, int | None]:
        peaks = {}
        for when, model in (("before", self.base), ("after", final)):
            inputs = Inputs(self._sample().copy() if self.changes_inputs else self._sample())
            peaks[f"peak_bytes_{when}"] = self.pass_context.backend.peak_of(
                trial.make_call(model, self.pass_context, inputs)
            )
        return peaks


def _require_number(name: str, value: Any, below: float, remedy: str) -> None:
    """Raise UserError unless `value` is None or a number with 0 <= value < below."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < below:
        raise UserError(f"{name} is {value!r}", remedy)


def _on_device(model: nn.Module, context: PassContext) -> nn.Module:
    moved = move_to_device(model, context.backend)
    return moved if context.training else moved.eval()
