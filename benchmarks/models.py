"""The four models our figures are about, in plain torch: a perceptron, ResNet-50, and transformers of the sizes of
GPT-2 small and BERT base. Random weights: time and memory do not depend on their values.

    model, sample = build("gpt2")                  # as published
    model, sample = build("gpt2", small=True)      # the same architecture, a thousandth of the work

Shapes in names: B batch, T tokens, D hidden, H heads, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class MLP(nn.Sequential):
    """Fully connected layers of the given widths with ReLU between them."""

    def __init__(self, *widths: int):
        layers: list[nn.Module] = []
        for wide, narrow in pairwise(widths):
            layers += [nn.Linear(wide, narrow), nn.ReLU()]
        super().__init__(*layers[:-1])


class Bottleneck(nn.Module):
    """1x1, 3x3 (carries the stride), 1x1 convolutions around a shortcut. Source: arXiv:1512.03385, version 1.5."""

    expansion = 4

    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        out = channels * self.expansion
        self.body = nn.Sequential(
            *_conv(channels_in, channels, 1), nn.ReLU(),
            *_conv(channels, channels, 3, stride), nn.ReLU(),
            *_conv(channels, out, 1),
        )  # fmt: skip
        same = stride == 1 and channels_in == out
        self.shortcut = nn.Identity() if same else nn.Sequential(*_conv(channels_in, out, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def _conv(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    conv = nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)
    return conv, nn.BatchNorm2d(channels_out)


class ResNet(nn.Sequential):
    """Images [B, 3, h, w] to scores [B, classes]. (3, 4, 6, 3) blocks of width 64 are ResNet-50: 25 557 032 weights."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000):
        layers: list[nn.Module] = [*_conv(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
        channels_in = width
        for stage, count in enumerate(blocks):
            channels = width << stage
            for block in range(count):
                layers.append(Bottleneck(channels_in, channels, 2 if stage > 0 and block == 0 else 1))
                channels_in = channels * Bottleneck.expansion
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, classes))


@dataclass(frozen=True)
class Sizes:
    """Of a transformer. No dropout: it would only add noise to figures."""

    vocab: int
    positions: int
    hidden: int = 768
    layers: int = 12
    heads: int = 12

    @property
    def small(self) -> "Sizes":
        return replace(self, vocab=211, positions=64, hidden=32, layers=2, heads=4)


class Block(nn.Module):
    """Attention and a four times wider feed-forward. GPT-2 normalises before each (pre), BERT after."""

    def __init__(self, sizes: Sizes, causal: bool):
        super().__init__()
        hidden = sizes.hidden
        self.heads, self.causal, self.pre = sizes.heads, causal, causal
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.gelu = nn.GELU(approximate="tanh" if causal else "none")

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.pre:
            x_BTD = x_BTD + self.attend(self.norm_1(x_BTD))
            return x_BTD + self.feed(self.norm_2(x_BTD))
        x_BTD = self.norm_1(x_BTD + self.attend(x_BTD))
        return self.norm_2(x_BTD + self.feed(x_BTD))

    def attend(self, x_BTD: Tensor) -> Tensor:
        batch, tokens, hidden = x_BTD.shape
        split = (batch, tokens, 3, self.heads, hidden // self.heads)
        q, k, v = self.qkv(x_BTD).view(split).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, hidden))

    def feed(self, x_BTD: Tensor) -> Tensor:
        return self.down(self.gelu(self.up(x_BTD)))


class GPT2(nn.Module):
    """Token ids [B, T] to logits [B, T, V]; the head is tied to the embedding. As published: 124 439 808 weights."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.tokens = _embedding(sizes.vocab, sizes.hidden)
        self.positions = _embedding(sizes.positions, sizes.hidden)
        self.blocks = nn.Sequential(*(Block(sizes, causal=True) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        places = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        return self.head(self.norm(self.blocks(self.tokens(ids_BT) + self.positions(places))))


class BERT(nn.Module):
    """Token ids [B, T] to scores [B, classes], through the pooler. Without the scores: 109 482 240 weights."""

    def __init__(self, sizes: Sizes, classes: int = 2):
        super().__init__()
        self.tokens = _embedding(sizes.vocab, sizes.hidden)
        self.positions = _embedding(sizes.positions, sizes.hidden)
        self.segments = _embedding(2, sizes.hidden)
        self.norm = nn.LayerNorm(sizes.hidden)
        self.blocks = nn.Sequential(*(Block(sizes, causal=False) for _ in range(sizes.layers)))
        self.pooler, self.head = nn.Linear(sizes.hidden, sizes.hidden), nn.Linear(sizes.hidden, classes)

    def forward(self, ids_BT: Tensor) -> Tensor:
        places = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        segments = torch.zeros_like(ids_BT)
        x_BTD = self.norm(self.tokens(ids_BT) + self.positions(places) + self.segments(segments))
        return self.head(torch.tanh(self.pooler(self.blocks(x_BTD)[:, 0])))


def _embedding(rows: int, hidden: int) -> nn.Embedding:
    """With the deviation both papers start from: torch's own 1.0 gives a tied head logits in the hundreds."""
    embedding = nn.Embedding(rows, hidden)
    nn.init.normal_(embedding.weight, std=0.02)
    return embedding


def _mlp(batch: int | None, seq: int | None, small: bool) -> tuple[nn.Module, Tensor]:
    widths = (16, 32, 32, 10) if small else (1024, 4096, 4096, 4096, 1000)
    return MLP(*widths), torch.randn(batch or 64, widths[0])


def _resnet50(batch: int | None, seq: int | None, small: bool) -> tuple[nn.Module, Tensor]:
    model = ResNet((1, 1, 1, 1), 8, 10) if small else ResNet()
    side = 32 if small else 224
    return model, torch.randn(batch or 8, 3, side, side)


def _gpt2(batch: int | None, seq: int | None, small: bool) -> tuple[nn.Module, Tensor]:
    sizes = Sizes(vocab=50257, positions=1024)
    return _language(GPT2, sizes.small if small else sizes, batch, seq, 1024)


def _bert(batch: int | None, seq: int | None, small: bool) -> tuple[nn.Module, Tensor]:
    sizes = Sizes(vocab=30522, positions=512)
    return _language(BERT, sizes.small if small else sizes, batch, seq, 128)


def _language(
    make: Callable[[Sizes], nn.Module], sizes: Sizes, batch: int | None, seq: int | None, usual: int
) -> tuple[nn.Module, Tensor]:
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
