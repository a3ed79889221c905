"""Gradients of every implementation against autograd in float64."""

import pytest
import torch
from kernel_cases import DTYPES, angles, draw, judge
from torch import Tensor
from torch.nn import functional as F

from workers.measurement.accuracy import Rounding

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=("f32", "f16", "bf16"))
SHAPES = ((1, 1), (3, 13), (2, 3, 8), (70, 130), (5, 1024), (3, 5000), (300, 64))
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
INTERPRETED = {(300, 64): (70, 64), (3, 5000): (3, 2500)}
"""Triton's interpreter takes milliseconds per block: here each of its 4 programs still takes several blocks of rows,
and a long row has two whole blocks and a part.
"""


def shape_for(kernels, shape: tuple[int, ...]) -> tuple[int, ...]:
    return INTERPRETED.get(shape, shape) if kernels.name == "triton" and kernels.interpreted else shape


def wide(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.double().requires_grad_() for t in tensors]


def compare(kernels, have, result: Tensor, grad: Tensor, of, dtype, depth, roundings=6.0) -> None:
    """`have` against what autograd finds for `of`, through `result` in float64."""
    want = torch.autograd.grad(result, [t for t in of if t is not None], grad.double())
    assert [t is None for t in have] == [t is None for t in of]
    for number, (a, b) in enumerate(zip([t for t in have if t is not None], want, strict=True)):
        judge(kernels, a, b, Rounding(a.dtype, depth, roundings), f"gradient {number}")


@shapes
def test_rmsnorm_gives_gradients_of_rows_and_weight(kernels, shape, dtypes_of):
    for dtype in dtypes_of(kernels, SHAPES.index(shape)):
        check_rmsnorm(kernels, shape_for(kernels, shape), dtype)


def check_rmsnorm(kernels, shape, dtype) -> None:
    x, w, g = draw(*shape).to(dtype), draw(shape[-1]).to(dtype), draw(*shape, 1)[..., 0].to(dtype)
    here = kernels.device
    eps = 1e-6 if shape[-1] > 4 else 0.5  # a norm of one value has no slope but what eps gives it
    for weight, offset in ((w, 0.0), (None, 0.0), (w, 1.0), (w.float(), 0.0)):
        moved = None if weight is None else weight.to(here)
        have = kernels.rmsnorm_backward(g.to(here), x.to(here), moved, eps, offset=offset)
        xx, ww = wide(x, weight)
        result = F.rms_norm(xx, shape[-1:], None, eps) * (1 if ww is None else ww + offset)
        rows = x.numel() // shape[-1]
        compare(kernels, have, result, g, (xx, ww), dtype, depth=max(shape[-1], rows))


@pytest.mark.parametrize("shape", SHAPES[1:], ids=lambda shape: "x".join(map(str, shape)))
def test_layernorm_gives_gradients_of_rows_weight_and_bias(kernels, shape, dtypes_of):
    for dtype in dtypes_of(kernels, SHAPES.index(shape)):
        check_layernorm(kernels, shape_for(kernels, shape), dtype)


def check_layernorm(kernels, shape, dtype) -> None:
    x, w, b = draw(*shape).to(dtype), draw(shape[-1]).to(dtype), draw(shape[-1], 1)[:, 0].to(dtype)
    g, here = draw(*shape, 1)[..., 0].to(dtype), kernels.device
    for weight, bias in ((w, b), (w, None), (None, None), (w.float(), b.float())):
        moved = [None if one is None else one.to(here) for one in (weight, bias)]
        have = kernels.layernorm_backward(g.to(here), x.to(here), *moved)
        xx, ww, bb = wide(x, weight, bias)
        result = F.layer_norm(xx, shape[-1:], ww, bb)
        rows = x.numel() // shape[-1]
        compare(kernels, have, result, g, (xx, ww, bb), dtype, depth=max(shape[-1], rows))


@shapes
def test_softmax_and_gates_give_gradients(kernels, shape, dtypes_of):
    for dtype in dtypes_of(kernels, SHAPES.index(shape)):
        check_softmax_and_gates(kernels, shape_for(kernels, shape), dtype)


def check_softmax_and_gates(kernels, shape, dtype) -> None:
    x, up, g = (draw(*shape, n)[..., 0].to(dtype) for n in (1, 2, 3))
    here = kernels.device
    (xx, uu) = wide(x, up)
    y = x.double().softmax(-1).to(dtype)
    rounded = y.double().requires_grad_()
    through = rounded * (g.double() - (g.double() * rounded).sum(-1, keepdim=True))
    have = kernels.softmax_backward(g.to(here), y.to(here))
    judge(kernels, have, through.detach(), Rounding(dtype, shape[-1], 6), "softmax")
    compare(kernels, [kernels.silu_backward(g.to(here), x.to(here))], F.silu(xx), g, [xx], dtype, 1)
    have = kernels.swiglu_backward(g.to(here), x.to(here), up.to(here))
    compare(kernels, have, F.silu(xx) * uu, g, [xx, uu], dtype, 1)


@each_dtype
@pytest.mark.parametrize("layout", ("halves", "pairs"))
def test_rope_turns_gradients_back(kernels, layout, dtype):
    x, here = draw(2, 3, 5, 22).to(dtype), kernels.device
    cos, sin = (table.to(dtype) for table in angles(9, 6))
    turned = kernels.apply_rope(x.to(here), cos.to(here), sin.to(here), position=4, layout=layout)
    back = kernels.apply_rope_backward(turned, cos.to(here), sin.to(here), position=4, layout=layout)
    norm = (cos.double() ** 2 + sin.double() ** 2)[4:9]  # 1 but for the rounding of the tables
    scale = torch.cat((norm, norm), -1) if layout == "halves" else norm.repeat_interleave(2, -1)
    want = x.double() * torch.cat((scale, torch.ones(5, 10, dtype=torch.float64)), -1)
    judge(kernels, back, want, Rounding(dtype, 4, 8), layout)


ATTENTIONS = {
    "plain": (2, 2, 6, 9, {}),
    "grouped": (6, 2, 5, 33, {}),
    "causal": (4, 1, 33, 33, {"causal": True}),
    "longer-past": (4, 2, 5, 37, {"causal": True}),
    "shorter-past": (2, 1, 9, 4, {"causal": True, "scale": 0.4}),
    "mask": (2, 2, 6, 9, {"mask": True}),
    "both": (2, 2, 67, 131, {"mask": True, "causal": True}),
}
"""Heads of queries and of keys, tokens of queries and of keys."""


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_gives_gradients_of_all_three(kernels, name, dtypes_of):
    for dtype in dtypes_of(kernels, list(ATTENTIONS).index(name)):
        check_attention(kernels, *ATTENTIONS[name], dtype)


def check_attention(kernels, heads, kept, asked, many, options, dtype) -> None:
    options, here, width = dict(options), kernels.device, 40
    if options.pop("mask", False):
        options["mask"] = draw(2, 1, asked, many) > -0.8
    q, k, v = (
        draw(2, heads, asked, width).to(dtype),
        draw(2, kept, many, width).to(dtype),
        draw(2, kept, many, width, 1),
    )
    v, g = v[..., 0].to(dtype), draw(2, heads, asked, width, 2)[..., 0].to(dtype)
    moved = {n: o.to(here) if isinstance(o, Tensor) else o for n, o in options.items()}
    arrays = [t.to(here) for t in (q, k, v)]
    result, lse = kernels.attention(*arrays, **moved, return_lse=True)
    have = kernels.attention_backward(g.to(here), *arrays, result, lse, **moved)
    qq, kk, vv = wide(q, k, v)
    seen = torch.ones(asked, many, dtype=torch.bool)
    seen = seen.tril(many - asked) if options.get("causal") else seen
    seen = seen & options["mask"] if "mask" in options else seen
    spread = [t.repeat_interleave(heads // kept, 1) for t in (kk, vv)]
    scores = qq @ spread[0].mT * options.get("scale", width**-0.5)
    shares = scores.masked_fill(~seen, -1e30).softmax(-1) * seen
    judge(kernels, result, (shares @ spread[1]).detach(), Rounding(dtype, many, 4), "result")
    compare(kernels, have, shares @ spread[1], g, (qq, kk, vv), dtype, depth=many * width, roundings=12)


@each_dtype
def test_matmul_gives_gradients_of_both(kernels, dtype):
    a, b, g = draw(2, 9, 20).to(dtype), draw(2, 20, 11).to(dtype), draw(2, 9, 11).to(dtype)
    have = kernels.matmul_backward(*(t.to(kernels.device) for t in (g, a, b)))
    aa, bb = wide(a, b)
    compare(kernels, have, aa @ bb, g, (aa, bb), dtype, depth=20, roundings=1)
