"""The models of the catalogue in plain torch. Weights are random: time and memory do not depend on their values.

Shapes in names: B batch, T tokens, D hidden, H heads, V vocabulary, S cached tokens.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class MLP(nn.Sequential):
    """Fully connected layers of these `widths` with ReLU between them."""

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
        # Branches start near zero, as in training recipes (arXiv:1706.02677). With all ones the gradients of a new
        # network are so chaotic that float32 and float64 differ by 2 %, and no device could be checked.
        nn.init.constant_(cast(Tensor, self.body[-1].weight), 0.1)
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
    """Sizes of a transformer. There is no dropout, which would only add noise to measurements."""

    vocab: int
    positions: int
    hidden: int = 768
    layers: int = 12
    heads: int = 12


class TransformerBlock(nn.Module):
    """Attention and a four times wider feed-forward. GPT-2 and ViT normalise before each (pre), BERT after."""

    def __init__(self, sizes: Sizes, causal: bool, pre: bool):
        super().__init__()
        hidden = sizes.hidden
        self.heads, self.causal, self.pre = sizes.heads, causal, pre
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.gelu = nn.GELU(approximate="tanh" if causal else "none")

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.pre:
            x_BTD = x_BTD + self.attend(self.norm_1(x_BTD))
            return x_BTD + self.feed(self.norm_2(x_BTD))
        x_BTD = self.norm_1(x_BTD + self.attend(x_BTD))
        output: Tensor = self.norm_2(x_BTD + self.feed(x_BTD))
        return output

    def attend(self, x_BTD: Tensor, cached: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Self-attention. `cached`: keys and values [B, H, S, D / H] of earlier tokens, all visible to these."""
        batch, tokens, hidden = x_BTD.shape
        split = (batch, tokens, 3, self.heads, hidden // self.heads)
        q, k, v = self.qkv(x_BTD).view(split).permute(2, 0, 3, 1, 4)
        if cached is not None:
            k, v = torch.cat((cached[0].to(k.dtype), k), 2), torch.cat((cached[1].to(v.dtype), v), 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal and cached is None)
        output: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, hidden))
        return output

    def feed(self, x_BTD: Tensor) -> Tensor:
        output: Tensor = self.down(self.gelu(self.up(x_BTD)))
        return output


class GPT2(nn.Module):
    """Token ids [B, T] to logits [B, T, V]; the head is tied to the embedding. As published: 124 439 808 weights."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.tokens = _embedding(sizes.vocab, sizes.hidden)
        self.positions = _embedding(sizes.positions, sizes.hidden)
        self.blocks = nn.Sequential(*(TransformerBlock(sizes, causal=True, pre=True) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        positions = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        output: Tensor = self.head(self.norm(self.blocks(self.tokens(ids_BT) + self.positions(positions))))
        return output


class GPT2Decode(nn.Module):
    """Generate one token per sequence [B, 1] with cached keys and values of S tokens: [L, 2, B, H, S, D / H]."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.model = GPT2(sizes)

    def forward(self, ids_B1: Tensor, cache: Tensor) -> Tensor:
        gpt = self.model
        x_B1D = gpt.tokens(ids_B1) + gpt.positions.weight[cache.shape[4]]
        for block, (keys, values) in zip(gpt.blocks, cache, strict=True):
            assert isinstance(block, TransformerBlock)
            x_B1D = x_B1D + block.attend(block.norm_1(x_B1D), (keys, values))
            x_B1D = x_B1D + block.feed(block.norm_2(x_B1D))
        output: Tensor = gpt.head(gpt.norm(x_B1D))
        return output


class ViT(nn.Module):
    """Images [B, 3, x, x] to scores [B, classes] by the class token. ViT-B/16 has 86 567 656 weights."""

    def __init__(self, sizes: Sizes, side: int, patch: int, classes: int):
        super().__init__()
        self.patches = nn.Conv2d(3, sizes.hidden, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, sizes.hidden))
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, sizes.hidden) * 0.02)
        self.blocks = nn.Sequential(*(TransformerBlock(sizes, causal=False, pre=True) for _ in range(sizes.layers)))
        self.norm, self.head = nn.LayerNorm(sizes.hidden), nn.Linear(sizes.hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches_BTD = self.patches(images).flatten(2).transpose(1, 2)
        x_BTD = torch.cat((self.first.expand(len(images), -1, -1).to(patches_BTD.dtype), patches_BTD), 1)
        output: Tensor = self.head(self.norm(self.blocks(x_BTD + self.positions))[:, 0])
        return output


class DLRM(nn.Module):
    """Dense values [B, dense] and one index per table [B, tables] to scores [B, 1]."""

    def __init__(self, tables: int, rows: int, width: int, lower: tuple[int, ...], upper: tuple[int, ...]):
        super().__init__()
        self.tables = nn.ModuleList(_embedding(rows, width) for _ in range(tables))
        self.lower, self.upper = MLP(*lower), MLP(*upper)
        self.pairs: Tensor
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1), persistent=False)

    def forward(self, dense: Tensor, indices: Tensor) -> Tensor:
        below = self.lower(dense)
        vectors = torch.stack([below, *(table(indices[:, i]) for i, table in enumerate(self.tables))], 1)
        products = vectors @ vectors.transpose(1, 2)
        output: Tensor = self.upper(torch.cat((below, products[:, self.pairs[0], self.pairs[1]].to(below.dtype)), 1))
        return output


class BERT(nn.Module):
    """Token ids [B, T] to scores [B, classes], through the pooler. Without the scores: 109 482 240 weights."""

    def __init__(self, sizes: Sizes, classes: int = 2):
        super().__init__()
        self.tokens = _embedding(sizes.vocab, sizes.hidden)
        self.positions = _embedding(sizes.positions, sizes.hidden)
        self.segments = _embedding(2, sizes.hidden)
        self.norm = nn.LayerNorm(sizes.hidden)
        self.blocks = nn.Sequential(*(TransformerBlock(sizes, causal=False, pre=False) for _ in range(sizes.layers)))
        self.pooler, self.head = nn.Linear(sizes.hidden, sizes.hidden), nn.Linear(sizes.hidden, classes)

    def forward(self, ids_BT: Tensor) -> Tensor:
        positions = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        segments = torch.zeros_like(ids_BT)
        x_BTD = self.norm(self.tokens(ids_BT) + self.positions(positions) + self.segments(segments))
        output: Tensor = self.head(torch.tanh(self.pooler(self.blocks(x_BTD)[:, 0])))
        return output


def _embedding(rows: int, hidden: int) -> nn.Embedding:
    """Embedding with std 0.02, as in both papers: torch's 1.0 would give a tied head logits in the hundreds."""
    embedding = nn.Embedding(rows, hidden)
    nn.init.normal_(embedding.weight, std=0.02)
    return embedding
