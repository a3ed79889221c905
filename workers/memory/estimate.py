"""`estimate_memory`: one question for a module, a transformer's plain numbers, or a configuration of one. No torch is
imported unless a module is given.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from cluster.errors import UserError, nearest
from workers.memory.transformer_shape import TransformerShape

MODES = ("inference", "training")
EXECUTIONS = ("eager", "xla")


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on one device. Each part is what it needs by itself; they do not all live at once.

    total_bytes  the most that is live at one moment, which `peak` names (forward, backward, step): weights and
                 optimizer state, and activations, or at the optimizer's step gradients, and workspace.
    activations  in training what forward keeps for backward; in inference inputs, outputs and everything between.
    workspace    what comes on top at that moment: gradients of activations, temporaries of the optimizer.
    found_by     how: what was traced or which formulas, and what they leave out.

    Left out always: the process and its libraries, a kernel's own scratch, an allocator's fragmentation and caches.
    """

    weights_bytes: int
    gradients_bytes: int = 0
    optimizer_state_bytes: int = 0
    activations_bytes: int = 0
    kv_cache_bytes: int = 0
    workspace_bytes: int = 0
    total_bytes: int = 0
    peak: str = "forward"
    found_by: str = ""

    def __str__(self) -> str:
        parts = ("weights", "gradients", "optimizer_state", "activations", "kv_cache", "workspace")
        told = ", ".join(f"{p.replace('_', ' ')} {_size(n)}" for p in parts if (n := getattr(self, f"{p}_bytes")))
        return f"{_size(self.total_bytes)} at its peak, in {self.peak} ({told}); {self.found_by}"


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
    """Memory of one call, or of one training step after the first.

    A torch.nn.Module is traced on fake tensors: nothing of it is allocated, copied or changed. It needs `sample_input`
    (a tensor, a tuple of arguments or a dict of keyword arguments; meta tensors will do), whose first dimension becomes
    `batch`, and the second of token ids `seq`; a module with a `config.vocab_size` needs only the two. `loss` makes the
    scalar to train on from the module's output; left out, the output's own `loss`, else its mean.

    A TransformerShape, or a mapping or object with a transformer's numbers (`hidden_size` or `n_embd`, ...), is
    computed from: see workers.memory.transformer_shape for the derivation.

    `dtype` is that of weights and activations: a module's own, a shape's bytes per element where None. `optimizer` is
    a name, None for gradients alone, or for a module also a function of its parameters. `execution` is "eager", or
    "xla" where one compiled program makes the step. Raises UserError for what cannot be estimated, naming the nearest
    word; nothing is changed.
    """
    check_choice("mode", mode, MODES)
    check_choice("execution", execution, EXECUTIONS)
    for name, size in (("batch", batch), ("seq", seq)):
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise UserError(f"{name} is {size!r}", "give a whole number of at least 1")
    training = mode == "training"
    if (shape := as_shape(model_or_config)) is not None:
        if execution != "eager":
            raise UserError("formulas know eager execution only", "give the module itself to estimate it for XLA")
        formulas = import_module("workers.memory.formulas")
        found: MemoryEstimate = formulas.estimate(shape, batch or 1, seq, dtype, training, optimizer)
        return found
    runs = import_module("workers.memory.traced_run")
    request = runs.TraceRequest(batch, seq, dtype, training, optimizer if training else None, loss, execution == "xla")
    traced: MemoryEstimate = runs.estimate(model_or_config, sample_input, request)
    return traced


def as_shape(given: Any) -> TransformerShape | None:
    """None for what holds no transformer's numbers itself, as a module does not."""
    if isinstance(given, TransformerShape):
        return given
    if isinstance(given, Mapping):
        return TransformerShape.from_config(given)
    if hasattr(given, "parameters") or isinstance(given, type):
        return None
    named = given.to_dict() if callable(getattr(given, "to_dict", None)) else getattr(given, "__dict__", {})
    return TransformerShape.from_config(named) if named else None


def check_choice(what: str, word: Any, valid: tuple[str, ...]) -> None:
    """Raises UserError naming the nearest of `valid`."""
    if word not in valid:
        raise UserError(f"unknown {what} {word!r}", nearest(str(word).lower(), valid))
