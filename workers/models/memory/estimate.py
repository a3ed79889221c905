"""`estimate_memory` for a module, a transformer's dimensions, or its configuration.

torch is imported only if a module is passed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from cluster.errors import UserError, nearest
from workers.models.memory.transformer_shape import TransformerShape

MODES = ("inference", "training")
EXECUTIONS = ("eager", "xla")


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Estimated bytes on one device. The parts are not all live at the same time, so their sum exceeds the total.

    total_bytes  maximum that is live at one moment, which `peak` names (forward, backward, step): weights, optimizer
                 state, workspace, and activations or, at the optimizer's step, gradients.
    activations  in training what forward saves for backward; in inference inputs, outputs and everything between.
    workspace    additional bytes at that moment: gradients of activations, temporaries of the optimizer.
    method       what was traced or which formulas were used, and what they leave out.

    Never included: the process and its libraries, scratch memory of kernels, an allocator's fragmentation and caches.
    """

    weights_bytes: int
    gradients_bytes: int = 0
    optimizer_state_bytes: int = 0
    activations_bytes: int = 0
    kv_cache_bytes: int = 0
    workspace_bytes: int = 0
    total_bytes: int = 0
    peak: str = "forward"
    method: str = ""

    def __str__(self) -> str:
        parts = ("weights", "gradients", "optimizer_state", "activations", "kv_cache", "workspace")
        sizes = ", ".join(f"{p.replace('_', ' ')} {_size(n)}" for p in parts if (n := getattr(self, f"{p}_bytes")))
        return f"{_size(self.total_bytes)} at its peak, in {self.peak} ({sizes}); {self.method}"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def estimate_memory(
    model_or_config: Any,
    batch: int | None = None,
    seq: int | None = None,
    dtype: Any = None,
    mode: str = "inference",
    optimizer: str | Callable[..., Any] | None = "adamw",
    sample_input: Any = None,
    *,
    loss: Callable[[Any], Any] | None = None,
    execution: str = "eager",
) -> MemoryEstimate:
    """Estimate the memory of one call, or of one training step after the first.

    A torch.nn.Module is traced on fake tensors: no tensor of it is allocated, copied or changed. It needs
    `sample_input` (a tensor, a tuple of arguments or a dict of keyword arguments; meta tensors are accepted). Its first
    dimension is replaced by `batch`, the second dimension of token ids by `seq`; a module with a `config.vocab_size`
    needs only these two. `loss` computes the scalar to train on from the module's output (default: the output's own
    `loss`, else its mean).

    For a TransformerShape, or a mapping or object with a transformer's dimensions (`hidden_size` or `n_embd`, ...), the
    estimate is computed by formulas: workers.models.memory.transformer_shape derives them.

    `dtype` applies to weights and activations (None: the module's own, or the shape's bytes per element). `optimizer`
    is a name, None for gradients alone, or, for a module, also a function of its parameters. `execution` is "eager", or
    "xla" if one compiled program computes the step. Raises UserError for what cannot be estimated, naming the nearest
    valid choice. Does not change its arguments.
    """
    check_choice("mode", mode, MODES)
    check_choice("execution", execution, EXECUTIONS)
    for name, size in (("batch", batch), ("seq", seq)):
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise UserError(f"{name} is {size!r}", "write an integer of at least 1")
    training = mode == "training"
    if (shape := as_shape(model_or_config)) is not None:
        if execution != "eager":
            raise UserError("formulas cover eager execution only", "pass the module itself to estimate it for XLA")
        formulas = import_module("workers.models.memory.formulas")
        result: MemoryEstimate = formulas.estimate(shape, batch or 1, seq, dtype, training, optimizer)
        return result
    runs = import_module("workers.models.memory.traced_run")
    request = runs.TraceRequest(batch, seq, dtype, training, optimizer if training else None, loss, execution == "xla")
    traced: MemoryEstimate = runs.estimate(model_or_config, sample_input, request)
    return traced


def as_shape(value: Any) -> TransformerShape | None:
    """Convert a configuration to a TransformerShape. Return None for a module or another object without attributes."""
    if isinstance(value, TransformerShape):
        return value
    if isinstance(value, Mapping):
        return TransformerShape.from_config(value)
    if hasattr(value, "parameters") or isinstance(value, type):
        return None
    numbers = value.to_dict() if callable(getattr(value, "to_dict", None)) else getattr(value, "__dict__", {})
    return TransformerShape.from_config(numbers) if numbers else None


def check_choice(what: str, value: Any, valid: tuple[str, ...]) -> None:
    """Raise UserError, which names the nearest valid choice, unless `value` is one of `valid`."""
    if value not in valid:
        raise UserError(f"unknown {what} {value!r}", nearest(str(value).lower(), valid))
