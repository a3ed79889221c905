"""The optimiser: every pass of a level is tried on the sample input, measured against going on without it, and kept
only if the result stays right and does not get slower.
"""

from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cluster.errors import UserError
from workers.backends.parts import device_transfer
from workers.backends.parts.precision import precision_of
from workers.benchmark.timing import Timer
from workers.config import compile_mode_of
from workers.optimization_levels import OptimizationLevel
from workers.optimizers import passes, speedup_history, trial
from workers.optimizers.inputs import Inputs
from workers.optimizers.output_difference import largest_difference
from workers.optimizers.pass_context import PassContext, Sample, SkipPass, as_sample, deep_copy
from workers.optimizers.preparation import mark, placed
from workers.optimizers.result import OptimizationResult, OptimizationStrategy
from workers.optimizers.timing import TimingComparison, compare_timings

if TYPE_CHECKING:
    from workers.backends.base import BaseBackend
    from workers.config import PolyfleetConfig

# How far a result may be from the float32 model, relative to its largest value, where the caller says nothing: as far
# as rounding in that precision takes it, and for quantised weights as far as those are.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
QUANTIZED = ("int8_weights", "fp8_linear")


def get_optimizer(name: "str | None" = None, config: "PolyfleetConfig | None" = None) -> "ModelOptimizer":
    """The optimiser of a back end by its name, or of the best that is here. Raises as `get_backend` does."""
    from workers.selection.factory import get_backend

    return ModelOptimizer(get_backend(name, config))


def get_available_strategies(name: "str | None" = None) -> list[OptimizationStrategy]:
    """Every pass, with what it was measured to bring on this machine's devices of that back end."""
    return get_optimizer(name).get_available_strategies()


class ModelOptimizer:
    """Optimises models for one device."""

    def __init__(self, backend: "BaseBackend"):
        self.backend = backend

    def get_available_strategies(self) -> list[OptimizationStrategy]:
        measured = speedup_history.speedups(self.backend.kind)
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
        """(the optimised model on the device, what was done, left and measured).

        `tolerance` is the largest error allowed, relative to the largest value of the float32 model's output (for
        training: of each gradient too). With a tolerance and no `dtype`, a lower precision the device has is tried as
        well. `memory_bytes` is what a training step may take (default: what is free). With `inplace` the caller's
        module itself is placed and changed.

        Raises UserError for what cannot be optimised; nothing is changed then.
        """
        chosen = OptimizationLevel.from_string(level)
        _require_number("tolerance", tolerance, 1, "give a relative error of at least 0 and below 1")
        _require_number("memory_bytes", memory_bytes, float("inf"), "give the bytes that a training step may take")
        work = self._work(model, sample_input, dtype, tolerance, for_training, memory_bytes)
        if work.sample is None:
            return self._unmeasured(model, chosen, work, inplace)
        with self.backend:
            done = _Trials(model, work, tolerance).run(chosen)
            final = done.build(model) if inplace else done.current
            return final, done.result(final, chosen)

    def _work(
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
        wanted = precision_of(self.backend.precision if dtype is None else dtype)
        self.backend.require_dtype(wanted)
        if dtype is None and wanted == torch.float32 and tolerance is not None:
            wanted = self._lower_precision()
        given: Sample | None = self.backend.to_device(sample)
        return PassContext(self.backend, wanted, training, given, memory, compile_mode_of(self.backend.config))

    def _lower_precision(self) -> torch.dtype:
        native = [d for d in (torch.bfloat16, torch.float16) if self.backend.supports_dtype(d)]
        return native[0] if native else torch.float32

    def _unmeasured(
        self, model: nn.Module, level: OptimizationLevel, work: PassContext, inplace: bool
    ) -> tuple[nn.Module, OptimizationResult]:
        mine = _on_device(model if inplace else deep_copy(model), work)
        done = passes.run(mine, level, work)
        mark(done.model, level, done.applied)
        told = "without a sample input nothing was measured, and nothing checked"
        return done.model, OptimizationResult(False, done.model, level, done.applied, done.skipped, [told])


class _Trials:
    """The passes kept so far, and what was measured of each. A candidate is always built from a fresh copy."""

    def __init__(self, model: nn.Module, work: PassContext, tolerance: float | None):
        self.model, self.work, self.tolerance = model, work, tolerance
        self.kept: list[passes.Pass] = []
        self.skipped: dict[str, str] = {}
        self.races: dict[str, TimingComparison] = {}
        self.details: dict[str, str] = {}
        self.compile_s = 0.0
        self.warnings: list[str] = []
        self.changes_inputs = False
        self.timer = Timer(work.backend)
        self.kind = work.backend.kind
        self.base = self.build(deep_copy(model))
        self.want = self._reference()
        have = self._outcome(self.base)
        self.current, self.error = self.base, largest_difference(have, self.want)
        if reason := self._unjudged(have):
            self.warnings.append(reason)

    def run(self, level: OptimizationLevel) -> "_Trials":
        for one in sorted(passes.passes_for_level(level), key=lambda p: p.first):
            if self.warnings:
                self.skipped[one.name] = "the model's result cannot be judged: see the warnings"
                continue
            try:
                self._try(one)
            except SkipPass as e:
                self.skipped[one.name] = str(e)
        return self

    def build(self, mine: nn.Module, extra: "passes.Pass | None" = None) -> nn.Module:
        """The kept passes, and one more, over a model that is ours. Raises Skip where that one does not apply."""
        wanted = [*self.kept, *([extra] if extra else [])]
        self.work.details, self.work.compile_mode = {}, compile_mode_of(self.work.backend.config)
        done = passes.apply(_on_device(mine, self.work), wanted, self.work)
        if extra is not None and extra.name in done.skipped:
            raise SkipPass(done.skipped[extra.name])
        if done.skipped:
            raise SkipPass("; ".join(f"{name} fails beside it: {reason}" for name, reason in done.skipped.items()))
        return done.model

    def _try(self, one: passes.Pass) -> None:
        if one.name == "max_autotune" and not any(p.name == "compile" for p in self.kept):
            raise SkipPass("the compiler was not kept")
        begun = perf_counter()
        candidate = self.build(deep_copy(self.model), one)
        have = self._outcome(candidate)
        built_s = perf_counter() - begun
        error = largest_difference(have, self.want)
        if reason := trial.not_finite(have):
            raise SkipPass(f"rolled back: {reason}")
        if not error.max_rel <= (limit := self._limit(one)):
            raise SkipPass(f"rolled back: off by {error.max_rel:.2g} of the largest value, more than {limit:.2g}")
        raced = self._race(self.current, candidate)
        self.races[one.name] = raced
        self._remember(one.name, raced.ratio.median)
        # What saves memory may cost time: that is its purpose.
        if raced.slower and one.name != "activation_checkpointing":
            low, high = raced.ratio.low, raced.ratio.high
            raise SkipPass(f"rolled back: {raced.ratio.median:.2f} times the speed ({low:.2f} to {high:.2f}) is slower")
        self.kept.append(one)
        self.details = dict(self.work.details)
        self.current, self.error = candidate, error
        if one.name in ("compile", "max_autotune"):
            self.compile_s += built_s

    def _race(self, first: nn.Module, second: nn.Module) -> TimingComparison:
        """Both on the same inputs: copies, where a call changes them in place."""
        inputs = Inputs(self._sample())
        before, after = (trial.make_call(one, self.work, inputs) for one in (first, second))
        inputs.probe(before)
        self.changes_inputs = bool(inputs.changed)
        return compare_timings(before, after, self.timer, inputs=inputs)

    def _limit(self, one: passes.Pass) -> float:
        if self.tolerance is not None:
            return self.tolerance
        lossy = [TOLERANCE[self.work.dtype]] if any(p.name == "autocast" for p in (*self.kept, one)) else []
        lossy += [5e-2] if any(p.name in QUANTIZED for p in (*self.kept, one)) else []
        return max([self._own_tolerance(), *lossy])

    def _own_tolerance(self) -> float:
        """How far the untouched model may be from its float32 twin: its own parameters may be of a lower precision."""
        dtypes = {p.dtype for p in self.model.parameters()}
        found = max([TOLERANCE[torch.float32], *(TOLERANCE[d] for d in dtypes if d in TOLERANCE)])
        return found if self.tolerance is None else max(self.tolerance, found)

    def _unjudged(self, have: list[torch.Tensor]) -> str:
        """Why nothing that is done to this model can be shown to be right, "" where it can."""
        for values, who in ((self.want, "of the untouched model"), (have, "of the model on this device")):
            if reason := trial.not_finite(values):
                return f"{reason} {who}: whether a pass changes it cannot be told"
        again = largest_difference(self._outcome(self.base), have)
        if not again.max_rel <= self._own_tolerance():
            return (
                f"two calls of the untouched model differ by {again.max_rel:.2g} of the largest value: "
                "its output is random, and whether a pass changes it cannot be told"
            )
        if not self.error.max_rel <= self._own_tolerance():
            return (
                f"the untouched model is off by {self.error.max_rel:.2g} of the largest value from itself in float32, "
                f"more than {self._own_tolerance():g}"
            )
        return ""

    def _reference(self) -> list[torch.Tensor]:
        """Of the caller's model in float32, untouched, on the same device."""
        plain = _on_device(deep_copy(self.model).float(), self.work)
        sample = self.work.sample
        assert sample is not None
        as_float = device_transfer.map_tensors(sample, lambda t: t.float() if t.is_floating_point() else t)
        exact = PassContext(self.work.backend, torch.float32, self.work.training, as_float)
        return self._outcome(plain, exact)

    def _outcome(self, model: nn.Module, work: PassContext | None = None) -> list[torch.Tensor]:
        try:
            return trial.outcome(model, work or self.work)
        except (RuntimeError, TypeError, ValueError, IndexError) as e:
            said = str(e).strip().splitlines()
            if model is getattr(self, "base", model) or work is not None:
                raise UserError(f"the model fails on its sample input: {said[0] if said else e!r}",
                                "give an input that the model takes") from e  # fmt: skip
            raise SkipPass(f"the model fails with it: {said[0] if said else repr(e)}") from e

    def _sample(self) -> Sample:
        assert self.work.sample is not None
        return self.work.sample

    def _remember(self, name: str, speedup: float) -> None:
        speedup_history.remember(self.kind, str(torch.__version__), name, speedup)

    def result(self, final: nn.Module, level: OptimizationLevel) -> OptimizationResult:
        names = [p.name for p in passes.PASSES if p in self.kept]
        applied = ["placement", *(f"{n}: {self.details[n]}" if n in self.details else n for n in names)]
        mark(final, level, applied)
        whole = self._race(self.base, final)
        metrics = {
            "latency_before_s": list(whole.first_s),
            "latency_after_s": list(whole.second_s),
            "speedup": list(whole.ratio),
            "max_abs_error": self.error.max_abs,
            "max_rel_error": self.error.max_rel,
            "tolerance": max((self._limit(p) for p in self.kept), default=self.tolerance or TOLERANCE[torch.float32]),
            "model_bytes_before": trial.model_bytes(self.base),
            "model_bytes_after": trial.model_bytes(final),
            **self._peaks(final),
            "compile_s": self.compile_s,
            "passes": {name: list(raced.ratio) for name, raced in self.races.items()},
        }
        return OptimizationResult(not self.warnings, final, level, applied, self.skipped, self.warnings, metrics)

    def _peaks(self, final: nn.Module) -> dict[str, int | None]:
        peaks = {}
        for when, model in (("before", self.base), ("after", final)):
            inputs = Inputs(self._sample().copy() if self.changes_inputs else self._sample())
            peaks[f"peak_bytes_{when}"] = self.work.backend.peak_of(trial.make_call(model, self.work, inputs))
        return peaks


def _require_number(name: str, value: Any, below: float, remedy: str) -> None:
    """None, or a number from 0 to below `below`. Raises UserError."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < below:
        raise UserError(f"{name} is {value!r}", remedy)


def _on_device(model: nn.Module, work: PassContext) -> nn.Module:
    mine = placed(model, work.backend)
    return mine if work.training else mine.eval()
