"""The passes of each level. A pass returns the changed model, or raises SkipPass with the reason.

O0: placement only. O1: numerically safe: layout, folding, and the requested precision. O2 adds the compiler, and
recomputed activations if a training step would not fit. O3 adds quantisation, kernels and the compiler's search.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from workers.models.optimizers.custom_kernels import custom_kernels
from workers.models.passes.activation_checkpointing import activation_checkpointing
from workers.models.passes.compilers import compile_model, max_autotune
from workers.models.passes.layout import channels_last, fold_conv_bn
from workers.models.passes.low_precision import autocast
from workers.models.passes.pass_context import PassContext, PreparedModel, SkipPass
from workers.models.passes.quantization import fp8_linear, int8_weights
from workers.options.optimization_levels import OptimizationLevel

O1, O2, O3 = OptimizationLevel.O1, OptimizationLevel.O2, OptimizationLevel.O3


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass. `first` is the lowest level that includes it. `change` may modify its model, which we own."""

    name: str
    first: OptimizationLevel
    change: Callable[[nn.Module, PassContext], nn.Module]
    description: str
    requires: tuple[str, ...] = ()


# In the order of application: passes that rewrite modules, then those that wrap them, then the compiler.
PASSES = (
    Pass("channels_last", O1, channels_last, "convolutions read images with adjacent channels",
         ("a 2-d convolution", "a sample input to check it on")),
    Pass("fold_conv_bn", O1, fold_conv_bn, "batch norms become part of the convolution before them",
         ("inference", "a forward that torch.fx can trace")),
    Pass("int8_weights", O3, int8_weights, "weights of linear layers as int8, with a scale per output channel",
         ("inference", "the CPU", "torchao", "a sample input")),
    Pass("fp8_linear", O3, fp8_linear, "linear layers in float8, scaled by tensor",
         ("inference", "units for float8", "torchao", "the option fp8", "a sample input")),
    Pass("custom_kernels", O3, custom_kernels, "norms, gates, rope and attention by kernels measured to be faster",
         ("a sample input", "measurements: `polyfleet kernels tune`")),
    Pass("activation_checkpointing", O2, activation_checkpointing, "repeated blocks recompute what backward needs",
         ("training", "repeated blocks", "a step that would not fit")),
    Pass("autocast", O1, autocast, "products in a lower precision where torch considers that safe",
         ("units for that precision", "a requested precision, or a tolerance that allows it")),
    Pass("max_autotune", O3, max_autotune, "the compiler tries several kernels and keeps the fastest", ("inductor",)),
    Pass("compile", O2, compile_model, "operators fused and compiled: inductor, openxla, or IPEX's operators",
         ("a compiler for this device",)),
)  # fmt: skip


def passes_for_level(level: str | OptimizationLevel) -> tuple[Pass, ...]:
    return tuple(p for p in PASSES if p.first <= OptimizationLevel.from_string(level))


def run(model: nn.Module, level: str | OptimizationLevel, context: PassContext) -> PreparedModel:
    """Apply all passes of `level` to `model`, which must be on its device and ours to change."""
    return apply(model, passes_for_level(level), context)


def apply(model: nn.Module, passes: Iterable[Pass], context: PassContext) -> PreparedModel:
    """Apply these passes, in the order of PASSES, to the user's module inside any wrappers."""
    names = {p.name for p in passes}
    applied, skipped = ["placement"], {}
    context.folded, inner = (), unwrap(model)
    context.is_compiled = hasattr(model, "_orig_mod")
    context.will_compile = context.is_compiled or "compile" in names
    original = inner
    for one in PASSES:
        if one.name not in names:
            continue
        try:
            inner = one.change(inner, context)
            applied.append(f"{one.name}: {context.details[one.name]}" if one.name in context.details else one.name)
        except SkipPass as e:
            skipped[one.name] = str(e)
    return PreparedModel(model if inner is original else inner, applied, skipped, context.folded)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's module inside torch.compile's and the data-parallel wrapper."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model
