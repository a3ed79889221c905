"""The four models our figures are about, of the architectures in workers/benchmark/cases/networks.py.

model, sample = build("gpt2")                  # as published
model, sample = build("gpt2", small=True)      # the same architecture, a thousandth of the work
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from workers.benchmark.cases.networks import BERT, GPT2, MLP, ResNet, Sizes


def _mlp(batch: int | None, seq: int | None, small: bool) -> tuple[nn.Module, Tensor]:
    widths = (16, 32, 32, 10) if small else (1024, 4096, 4096, 4096, 1000)
    return MLP(*widths), torch.randn(batch or 64, widths[0])


def _resnet50(batch: int | None, seq: int | None, small: bool) -> tuple[nn.Module, Tensor]:
    model = ResNet((1, 1, 1, 1), 8, 10) if small else ResNet()
    side = 32 if small else 224
    return model, torch.randn(batch or 8, 3, side, side)


def _gpt2(batch: int | None, seq: int | None, small: bool) -> tuple[nn.Module, Tensor]:
    return _language(GPT2, Sizes(vocab=50257, positions=1024), batch, seq, small, 1024)


def _bert(batch: int | None, seq: int | None, small: bool) -> tuple[nn.Module, Tensor]:
    return _language(BERT, Sizes(vocab=30522, positions=512), batch, seq, small, 128)


def _language(
    make: Callable[[Sizes], nn.Module], sizes: Sizes, batch: int | None, seq: int | None, small: bool, usual: int
) -> tuple[nn.Module, Tensor]:
    sizes = replace(sizes, vocab=211, positions=64, hidden=32, layers=2, heads=4) if small else sizes
    tokens = min(seq or usual, sizes.positions)
    return make(sizes), torch.randint(sizes.vocab, (batch or 4, tokens))


MODELS: dict[str, Callable[[int | None, int | None, bool], tuple[nn.Module, Any]]] = {
    "mlp": _mlp,
    "resnet50": _resnet50,
    "gpt2": _gpt2,
    "bert": _bert,
}


def build(name: str, *, batch: int | None = None, seq: int | None = None, small: bool = False) -> tuple[nn.Module, Any]:
    """A model on torch's default device, and the input of one call. `batch` and `seq` default to a usual size each."""
    return MODELS[name](batch, seq, small)
