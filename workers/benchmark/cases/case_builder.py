"""Build a case: a module and the inputs of one call, on the CPU, the same in every environment.

Every value comes from torch's CPU generator with the run's seed: its sequence is the same in all versions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from workers.benchmark.cases import networks
from workers.benchmark.cases.case import Case, Sizes
from workers.benchmark.cases.gradients import Gradients, random_gradient
from workers.benchmark.cases.models import dlrm_widths, mlp_widths
from workers.benchmark.cases.networks import Sizes as TransformerSizes
from workers.benchmark.cases.operations import key_heads
from workers.measurement.inputs import Sample

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True)
class BuiltCase:
    """A case that can be run. `sample` is in float32 and int64. `loss` reduces the output to a scalar, for training."""

    module: nn.Module
    sample: Sample
    loss: Loss


def build(case: Case, seed: int) -> BuiltCase:
    torch.manual_seed(seed)
    if case.definition.family == "model":
        module, inputs, loss = _MODELS[case.definition.name](case.sizes)
        return BuiltCase(module, Sample(inputs, {}), loss)
    function, inputs = _OPERATIONS[case.definition.name](case.sizes)
    if case.mode == "backward":
        module = Gradients(case.definition.name, function)
        return BuiltCase(module, Sample((random_gradient(function, inputs), *inputs), {}), mean_square)
    return BuiltCase(Operation(function), Sample(inputs, {}), mean_square)


class Operation(nn.Module):
    """Wrap a function of tensors as a module, so that optimisation levels apply to it as to any model."""

    def __init__(self, function: Callable[..., Tensor]):
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def mean_square(output: Any) -> Tensor:
    from workers.measurement.output_difference import first_tensor

    return first_tensor(output).float().square().mean()


def next_token_loss(logits_BTV: Tensor) -> Tensor:
    """Cross-entropy against token 0 everywhere: the target does not matter for measuring."""
    flat = logits_BTV.reshape(-1, logits_BTV.shape[-1]).float()
    return F.cross_entropy(flat, torch.zeros(len(flat), dtype=torch.long, device=flat.device))


# Operations: a function, and its inputs


def _matmul(s: Sizes) -> tuple[Any, tuple[Tensor, ...]]:
    return torch.matmul, (torch.randn(s["m"], s["k"]), torch.randn(s["k"], s["n"]))


def _convolution(s: Sizes) -> tuple[Any, tuple[Tensor, ...]]:
    padding = s["f"] // 2
    images, filters = torch.randn(s["b"], s["i"], s["x"], s["x"]), torch.randn(s["o"], s["i"], s["f"], s["f"])
    return (lambda x, w: F.conv2d(x, w, padding=padding)), (images, filters)


def _attention(s: Sizes) -> tuple[Any, tuple[Tensor, ...]]:
    causal, grouped = s["t"] == s["s"], "g" in s
    query_shape, key_shape = (s["b"], s["h"], s["t"], s["d"]), (s["b"], key_heads(s), s["s"], s["d"])
    inputs = (torch.randn(query_shape), torch.randn(key_shape), torch.randn(key_shape))
    return (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)), inputs


def _attention_scores(s: Sizes) -> tuple[Any, tuple[Tensor, ...]]:
    query_shape, key_shape = (s["b"], s["h"], s["t"], s["d"]), (s["b"], s["h"], s["s"], s["d"])
    scale = s["d"] ** -0.5
    return (lambda q, k: q @ k.mT * scale), (torch.randn(query_shape), torch.randn(key_shape))


def _matmul_vec(s: Sizes) -> tuple[Any, tuple[Tensor, ...]]:
    return torch.mv, (torch.randn(s["m"], s["k"]), torch.randn(s["k"]))


def _weighted_sum(s: Sizes) -> tuple[Any, tuple[Tensor, ...]]:
    return torch.matmul, (torch.randn(s["t"]), torch.randn(s["t"], s["c"]))


def _rope(s: Sizes) -> tuple[Any, tuple[Tensor, ...]]:
    half = s["d"] // 2
    angles = torch.arange(s["t"])[:, None] * 10000.0 ** (-torch.arange(half) / half)

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    return rotate, (torch.randn(s["b"], s["h"], s["t"], s["d"]), angles.cos(), angles.sin())


def _embedding(s: Sizes) -> tuple[Any, tuple[Tensor, ...]]:
    return F.embedding, (torch.randint(s["v"], (s["t"],)), torch.randn(s["v"], s["c"]))


def _cross_entropy(s: Sizes) -> tuple[Any, tuple[Tensor, ...]]:
    return F.cross_entropy, (torch.randn(s["t"], s["v"]), torch.randint(s["v"], (s["t"],)))


def _on_rows(function: Callable[..., Tensor], matrices: int = 1, vectors: int = 0) -> Callable[[Sizes], Any]:
    """Build an operation on matrices [r, c] and vectors [c]."""

    def make_inputs(s: Sizes) -> tuple[Any, tuple[Tensor, ...]]:
        shapes = [(s["r"], s["c"])] * matrices + [(s["c"],)] * vectors
        return function, tuple(torch.randn(shape) for shape in shapes)

    return make_inputs


_OPERATIONS: dict[str, Callable[[Sizes], Any]] = {
    "matmul": _matmul,
    "matmul-vec": _matmul_vec,
    "convolution": _convolution,
    "attention": _attention,
    "attention-scores": _attention_scores,
    "weighted-sum": _weighted_sum,
    "rmsnorm": _on_rows(lambda x, w: F.rms_norm(x, w.shape, w, eps=1e-6), vectors=1),
    "layernorm": _on_rows(lambda x, w, b: F.layer_norm(x, w.shape, w, b), vectors=2),
    "softmax": _on_rows(lambda x: x.softmax(-1)),
    "silu": _on_rows(F.silu),
    "swiglu": _on_rows(lambda gate, up: F.silu(gate) * up, matrices=2),
    "elementwise": _on_rows(lambda x, y: x * 1.5 + y, matrices=2),
    "reduction": _on_rows(lambda x: x.sum(-1)),
    "rope": _rope,
    "embedding": _embedding,
    "cross-entropy": _cross_entropy,
}


# Models: a module, its inputs, its loss


def _mlp(s: Sizes) -> tuple[nn.Module, tuple[Tensor, ...], Loss]:
    return networks.MLP(*mlp_widths(s)), (torch.randn(s["b"], s["d"]),), mean_square


def _resnet50(s: Sizes) -> tuple[nn.Module, tuple[Tensor, ...], Loss]:
    return networks.ResNet(width=s["channels"], classes=s["k"]), (torch.randn(s["b"], 3, s["x"], s["x"]),), mean_square


def _vit(s: Sizes) -> tuple[nn.Module, tuple[Tensor, ...], Loss]:
    model = networks.ViT(TransformerSizes(0, 0, s["d"], s["l"], s["h"]), s["x"], s["p"], s["k"])
    return model, (torch.randn(s["b"], 3, s["x"], s["x"]),), mean_square


def _gpt2(s: Sizes) -> tuple[nn.Module, tuple[Tensor, ...], Loss]:
    sizes = TransformerSizes(s["v"], s["positions"], s["d"], s["l"], s["h"])
    if "cached" not in s:
        return networks.GPT2(sizes), (torch.randint(s["v"], (s["b"], s["t"])),), next_token_loss
    cache = torch.randn(s["l"], 2, s["b"], s["h"], s["cached"], s["d"] // s["h"])
    return networks.GPT2Decode(sizes), (torch.randint(s["v"], (s["b"], 1)), cache), next_token_loss


def _bert(s: Sizes) -> tuple[nn.Module, tuple[Tensor, ...], Loss]:
    sizes = TransformerSizes(s["v"], s["positions"], s["d"], s["l"], s["h"])
    return networks.BERT(sizes, s["k"]), (torch.randint(s["v"], (s["b"], s["t"])),), mean_square


def _dlrm(s: Sizes) -> tuple[nn.Module, tuple[Tensor, ...], Loss]:
    model = networks.DLRM(s["tables"], s["rows"], s["d"], *dlrm_widths(s))
    return model, (torch.randn(s["b"], s["dense"]), torch.randint(s["rows"], (s["b"], s["tables"]))), mean_square


_MODELS: dict[str, Callable[[Sizes], tuple[nn.Module, tuple[Tensor, ...], Loss]]] = {
    "mlp": _mlp,
    "resnet50": _resnet50,
    "vit": _vit,
    "gpt2": _gpt2,
    "bert": _bert,
    "dlrm": _dlrm,
}
