"""Faults that kernels had elsewhere, planted one by one: the cases of the contract notice each."""

import pytest
import torch
from kernel_cases import CASES, check, rounded_share

from workers.kernels import formulas
from workers.kernels.implementations.torch import Kernels as Right


class LosesTheTail(Right):
    """Works by blocks of 64 columns, and forgets what is left over."""

    def _softmax(self, x, out):
        out.copy_(super()._softmax(x, out))
        out[:, x.shape[1] // 64 * 64 :] = 0


class CountsThePadding(Right):
    """Divides by the width of the block, which is rounded up."""

    def _rmsnorm(self, x, weight, out, eps, offset, rounded):
        block = 1 << (x.shape[1] - 1).bit_length()
        padded = torch.nn.functional.pad(x, (0, block - x.shape[1]))
        wide = padded[:, : x.shape[1]].float() * torch.rsqrt(padded.float().square().mean(-1, keepdim=True) + eps)
        out.copy_(wide if weight is None else wide * (offset + weight.float()))


class LosesTheLastRow(Right):
    def _swiglu(self, gate, up, out):
        super()._swiglu(gate, up, out)
        out[-1:].copy_(gate[-1:]) if len(out) > 1 else None


class WrapsOffsets(Right):
    """Offsets of elements in 16 bits, as others had them in 32: https://github.com/flagos-ai/FlagGems/issues/6411."""

    def _silu(self, x, out):
        super()._silu(x, out)
        flat = out.view(-1)
        flat[1 << 16 :] = flat[: max(len(flat) - (1 << 16), 0)].clone()


class AddsInShort(Right):
    """Sums in the dtype of the rows."""

    def _rmsnorm(self, x, weight, out, eps, offset, rounded):
        mean = x.cumsum(-1).sum(-1, keepdim=True) * 0 + x.square().cumsum(-1, dtype=x.dtype)[:, -1:] / x.shape[1]
        normed = x * torch.rsqrt(mean.float() + eps).to(x.dtype)
        out.copy_(normed if weight is None else normed.float() * (offset + weight.float()))


class CountsCausalFromTheBeginning(Right):
    def _attention(self, q, k, v, mask, out, lse, scale, causal):
        if causal:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()[None, None]
        return super()._attention(q, k, v, mask, out, lse, scale, False)


class TakesTheWrongGroup(Right):
    """Interleaves heads where groups are adjacent."""

    def _attention(self, q, k, v, mask, out, lse, scale, causal):
        order = torch.arange(q.shape[1]) % k.shape[1]
        return super()._attention(q, k[:, order], v[:, order], mask, out, lse, scale, causal)


class AnswersNaNForWhoSeesNothing(Right):
    def _attention(self, q, k, v, mask, out, lse, scale, causal):
        scores = formulas.masked(
            q.float() @ k.float().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale, mask, causal
        )
        out.copy_(scores.softmax(-1) @ v.float().repeat_interleave(q.shape[1] // v.shape[1], 1))


class TurnsByTheWrongRow(Right):
    """Forgets the position."""

    def _rope(self, x, cos, sin, out, position, pairs):
        return super()._rope(x, cos, sin, out, 0, pairs)


class ForgetsStrides(Right):
    """Reads memory as if it were contiguous, as with empty_like of a strided tensor."""

    def softmax(self, x, *, out=None):
        if x.untyped_storage().nbytes() >= (x.storage_offset() + x.numel()) * x.element_size():
            x = torch.as_strided(x, x.shape, torch.empty(x.shape).stride(), x.storage_offset())
        return super().softmax(x, out=out)


class Truncates(Right):
    """bfloat16 by cutting off bits."""

    def _silu(self, x, out):
        if x.dtype == torch.bfloat16:
            wide = torch.nn.functional.silu(x.float()).view(torch.int32) >> 16 << 16
            out.copy_(wide.view(torch.float32).bfloat16())
        else:
            super()._silu(x, out)


PLANTED = [
    *(LosesTheTail, CountsThePadding, LosesTheLastRow, WrapsOffsets, AddsInShort, CountsCausalFromTheBeginning),
    *(TakesTheWrongGroup, AnswersNaNForWhoSeesNothing, TurnsByTheWrongRow, ForgetsStrides),
]


def failing(kernels):
    for case in CASES:
        for dtype in (torch.float32, torch.bfloat16):
            try:
                check(kernels, case, dtype)
            except AssertionError:
                yield f"{case} {dtype}"


def test_without_a_fault_no_case_fails():
    assert list(failing(Right())) == []


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.__name__)
def test_a_planted_fault_fails_a_case(fault):
    assert next(failing(fault()), None)


def test_cutting_bits_off_is_noticed():
    assert rounded_share(Right(), torch.bfloat16) > 0.97 > 0.8 > rounded_share(Truncates(), torch.bfloat16)
