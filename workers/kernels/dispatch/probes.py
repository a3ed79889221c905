"""Test cases for measuring operations: arguments of several sizes, torch's result, and the growth of errors."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from workers.kernels.formulas import rotated

Arguments = tuple[Tensor, ...]
Shapes = tuple[tuple[int, ...], ...]
EPS = 1e-6
ROWS = (1, 16, 256, 4096)
COLUMNS = (1024, 4096, 16384, 65536, 131072)
MAX_ELEMENTS_ON_CPU, MAX_ELEMENTS_ON_OTHERS = 1 << 22, 1 << 28
"""Maximum elements of a matrix of rows: on the CPU some milliseconds of work."""


@dataclass(frozen=True, slots=True)
class Probe:
    """An operation with the shapes of its arguments. `causal` is attention's."""

    operation: str
    shapes: Shapes
    causal: bool = False

    def arguments(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Arguments:
        """Generate the arguments, the same in every process."""
        generator = torch.Generator().manual_seed(seed)
        tensors = tuple(torch.randn(shape, generator=generator) for shape in self.shapes)
        if self.operation == "apply_rope":
            tensors = (tensors[0], tensors[1].cos(), tensors[1].sin())
        return tuple(one.to(dtype).to(device) for one in tensors)

    @property
    def options(self) -> dict[str, Any]:
        """Options of the kernels' method."""
        return {"eps": EPS} if self.operation == "rmsnorm" else {"causal": True} if self.causal else {}

    def plain(self, *arrays: Tensor) -> Tensor:
        """Compute the operation with torch, as a model without our kernels does."""
        if self.operation == "attention":
            grouped = self.shapes[0][-3] != self.shapes[1][-3]
            q, k, v = arrays
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=grouped)
        return _PLAIN[self.operation](*arrays)

    @property
    def depth(self) -> float:
        """Longest chain of additions, as in workers/measurement/accuracy.py."""
        first, last = self.shapes[0], self.shapes[-1]
        if self.operation in ("silu", "swiglu", "apply_rope"):
            return 2
        return last[-2] if self.operation in ("attention", "weighted_sum_rows") else first[-1]

    @property
    def roundings(self) -> float:
        return 1 if self.operation in ("matmul", "matmul_vec", "weighted_sum_rows") else 4


def probes(operation: str, device: torch.device) -> Iterator[Probe]:
    """Iterate over sizes from each class of shapes that occurs in models."""
    if operation not in _SIZES:
        most = MAX_ELEMENTS_ON_CPU if device.type == "cpu" else MAX_ELEMENTS_ON_OTHERS
        for rows, columns in ((r, c) for r in ROWS for c in COLUMNS if r * c <= most):
            vectors = {"rmsnorm": 1, "layernorm": 2}.get(operation, 0)
            matrices = 2 if operation == "swiglu" else 1
            yield Probe(operation, ((rows, columns),) * matrices + ((columns,),) * vectors)
    else:
        for shapes in _SIZES[operation]:
            square = operation == "attention" and shapes[0][-2] == shapes[1][-2]
            yield Probe(operation, shapes, square)


def operations() -> tuple[str, ...]:
    return (*_PLAIN, "attention")


_PLAIN: dict[str, Callable[..., Tensor]] = {
    "rmsnorm": lambda x, w=None: F.rms_norm(x, x.shape[-1:], w, EPS),
    "layernorm": lambda x, w=None, b=None: F.layer_norm(x, x.shape[-1:], w, b),
    "softmax": lambda x: x.softmax(-1),
    "silu": F.silu,
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "apply_rope": lambda x, cos, sin: rotated(x, cos, sin, pairs=False),
    "matmul": torch.matmul,
    "matmul_vec": torch.mv,
    "weighted_sum_rows": torch.matmul,
    "compute_attention_scores": lambda q, k: q @ k.mT / math.sqrt(q.shape[-1]),
}
_SIZES: dict[str, tuple[Shapes, ...]] = {
    "apply_rope": tuple(
        ((1, heads, tokens, width), (tokens, width // 2), (tokens, width // 2))
        for heads, tokens, width in ((32, 1, 128), (8, 512, 64), (32, 512, 128))
    ),
    "matmul": tuple(
        ((m, k), (k, n)) for m, k, n in ((1, 2048, 2048), (16, 2048, 2048), (256, 1024, 1024), (1024, 1024, 1024))
    ),
    "matmul_vec": tuple(((m, k), (k,)) for m, k in ((1024, 1024), (4096, 4096))),
    "weighted_sum_rows": tuple(((t,), (t, d)) for t, d in ((1024, 128), (4096, 128), (4096, 4096))),
    "compute_attention_scores": (((1, 8, 1, 64), (1, 8, 1024, 64)), ((1, 8, 256, 64), (1, 8, 256, 64))),
    "attention": tuple(
        ((b, h, t, d), (b, g, s, d), (b, g, s, d))
        for b, h, g, t, s, d in (
            *((1, 8, 8, 256, 256, 64), (1, 32, 8, 256, 256, 128)),
            *((4, 8, 8, 1, 1024, 64), (1, 32, 8, 1, 4096, 128)),
        )
    ),
}
