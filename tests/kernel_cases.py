"""What every implementation of kernels must compute: calls of operations, and how far their results may be from
float64.

A case is a method, its arguments, and how errors grow in it. The reference is
workers/kernels/implementations/numpy.py in float64, of the same inputs as the dtype has them; that reference is held to
formulas of its own in test_reference.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from workers.kernels import create
from workers.measurement import accuracy

INF, NAN = float("inf"), float("nan")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def dtypes_by_turns(kernels: Any, number: int) -> tuple[torch.dtype, ...]:
    """The dtypes in which the gate computes case `number` of an operation: all; an interpreter, which is slow, one.
    tests/workers/kernels/test_interpreters.py, in the second tier, computes the others.
    """
    return (DTYPES[number % len(DTYPES)],) if getattr(kernels, "interpreted", False) else DTYPES


def dtypes_left_out(kernels: Any, number: int) -> tuple[torch.dtype, ...]:
    return tuple(dtype for dtype in DTYPES if dtype not in dtypes_by_turns(kernels, number))


@dataclass(frozen=True)
class Case:
    """`make` gives the arguments in float32, from a seeded generator; `also_float32` are those that keep that dtype."""

    name: str
    operation: str
    make: Callable[[], tuple[Any, ...]]
    options: dict[str, Any] = field(default_factory=dict)
    depth: float = 1.0
    roundings: float = 3.0
    stay: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.operation}-{self.name}"


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    """The same values each time for a shape."""
    generator = torch.Generator().manual_seed(sum((i + 1) * n for i, n in enumerate(shape)) + len(shape))
    return torch.randn(shape, generator=generator) * scale


def angles(positions: int, pairs: int) -> tuple[Tensor, Tensor]:
    turns = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(pairs) / pairs)
    return turns.cos(), turns.sin()


SHAPES = ((1, 1), (1, 7), (3, 13), (2, 3, 8), (5, 127), (4, 1024), (17, 257), (3, 5120), (2, 16384))
WIDE = ((2, 32768), (2, 65537), (1, 131072))
EMPTY = ((0, 8), (2, 0, 8), (3, 0))
SPECIAL = {
    "one-nan": lambda: with_value(draw(3, 40), NAN),
    "one-inf": lambda: with_value(draw(3, 40), INF),
    "one-minus-inf": lambda: with_value(draw(3, 40), -INF),
    "subnormal": lambda: draw(3, 40, scale=1e-6),
    "tiny": lambda: draw(3, 40, scale=1e-39),
    "large": lambda: draw(3, 40, scale=100.0),
    "strided": lambda: draw(6, 80)[::2, 1::2],
    "transposed": lambda: draw(40, 3).t(),
    "expanded": lambda: draw(1, 40).expand(3, 40),
}


def with_value(rows: Tensor, value: float) -> Tensor:
    rows[1, 7] = value
    return rows


def between_nan(values: Tensor) -> Tensor:
    """The same values in memory that is NaN before and after them: whoever reads beyond an end shows it."""
    margin = 4096
    memory = torch.full((values.numel() + 2 * margin,), NAN)
    inside = memory[margin:-margin].view(values.shape)
    return inside.copy_(values)


def _norms() -> list[Case]:
    found = []
    for shape in (*SHAPES, *WIDE, *EMPTY):
        c, name = shape[-1], "x".join(map(str, shape))
        depth = max(c, 1)
        found += [
            Case(name, "rmsnorm", lambda s=shape: (draw(*s), draw(s[-1])), depth=depth),
            Case(name, "layernorm", lambda s=shape: (draw(*s) + 1, draw(s[-1]), draw(s[-1], 1)[:, 0]), depth=depth),
            Case(name, "softmax", lambda s=shape: (draw(*s, scale=3.0),), depth=depth),
        ]
    for name, rows in SPECIAL.items():
        found += [
            Case(name, "rmsnorm", lambda r=rows: (r(), draw(40)), depth=40),
            Case(name, "layernorm", lambda r=rows: (r(), draw(40), draw(40, 1)[:, 0]), depth=40),
            Case(name, "softmax", lambda r=rows: (r(),), depth=40),
        ]
    return found


def _variants() -> list[Case]:
    plain = {"no-weight": (None, {}), "gemma": (lambda: draw(96), {"offset": 1.0}), "llama": (
        lambda: draw(96), {"round_before_weight": True}), "eps": (lambda: draw(96), {"eps": 0.5}),
        "gemma-rounded": (lambda: draw(96), {"offset": 1.0, "round_before_weight": True})}  # fmt: skip
    found = [
        Case(name, "rmsnorm", lambda w=weight: (draw(5, 96), w and w()), options, depth=96, roundings=4)
        for name, (weight, options) in plain.items()
    ]
    return [
        *found,
        Case("weight-in-float32", "rmsnorm", lambda: (draw(5, 96), draw(96)), depth=96, stay=(1,)),
        Case("zero-row", "rmsnorm", lambda: (torch.zeros(2, 96), draw(96))),
        Case("no-bias", "layernorm", lambda: (draw(5, 96), draw(96)), depth=96),
        Case("bare", "layernorm", lambda: (draw(5, 96),), depth=96),
        Case("in-float32", "layernorm", lambda: (draw(5, 96), draw(96), draw(96, 1)[:, 0]), depth=96, stay=(1, 2)),
        Case(
            "far-from-zero",
            "layernorm",
            lambda: (draw(4, 4096) + 30, draw(4096), draw(4096, 1)[:, 0]),
            depth=4096 * 900,
        ),
        Case("row-of-minus-inf", "softmax", lambda: (torch.stack([draw(40), torch.full((40,), -INF)]),), depth=40),
        Case("far-apart", "softmax", lambda: (draw(4, 300, scale=80.0),), depth=300),
    ]


def _gates() -> list[Case]:
    found = []
    for shape in ((1,), (7,), (3, 13), (2, 3, 8), (4, 4096), (17, 257), (2, 65537), (0, 8)):
        name = "x".join(map(str, shape))
        found += [
            Case(name, "silu", lambda s=shape: (draw(*s, scale=4.0),)),
            Case(name, "swiglu", lambda s=shape: (draw(*s, scale=4.0), draw(*s, 1)[..., 0])),
        ]
    for name, rows in SPECIAL.items():
        found += [Case(name, "silu", lambda r=rows: (r(),)), Case(name, "swiglu", lambda r=rows: (r(), draw(3, 40)))]
    return found


def _ropes() -> list[Case]:
    def make(shape: tuple[int, ...], pairs: int, spare: int = 0) -> Callable[[], tuple[Any, ...]]:
        return lambda: (draw(*shape), *angles(shape[-2] + spare, pairs))

    found = []
    for layout in ("halves", "pairs"):
        given = {"layout": layout}
        found += [
            Case(f"{layout}-whole", "apply_rope", make((2, 3, 5, 16), 8), given),
            Case(f"{layout}-partial", "apply_rope", make((2, 5, 22), 6), given),
            Case(f"{layout}-one-pair", "apply_rope", make((3, 2), 1), given),
            Case(f"{layout}-from-a-position", "apply_rope", make((4, 1, 128), 64, 9), given | {"position": 7}),
            Case(f"{layout}-in-float32", "apply_rope", make((2, 33, 80), 40), given, stay=(1, 2)),
            Case(f"{layout}-no-token", "apply_rope", make((2, 0, 8), 4, 3), given),
        ]
    return found


def _products() -> list[Case]:
    def a_b(m: int, k: int, n: int, *batch: int) -> Callable[[], tuple[Any, ...]]:
        return lambda: (draw(*batch, m, k), draw(*batch, k, n))

    sizes = (
        (1, 1, 1),
        (1, 37, 1),
        (3, 5, 7),
        (33, 65, 17),
        (64, 64, 64),
        (130, 70, 129),
        (8, 2048, 24),
        (16, 0, 8),
        (0, 4, 4),
    )
    found = [Case("x".join(map(str, s)), "matmul", a_b(*s), depth=max(s[1], 1), roundings=1) for s in sizes]
    return [
        *found,
        Case("batched", "matmul", a_b(9, 20, 11, 2, 3), depth=20, roundings=1),
        Case("one-matrix-for-all", "matmul", lambda: (draw(2, 3, 9, 20), draw(20, 11)), depth=20, roundings=1),
        Case("broadcast", "matmul", lambda: (draw(2, 1, 9, 20), draw(3, 20, 11)), depth=20, roundings=1),
        Case("second-transposed", "matmul", lambda: (draw(9, 20), draw(11, 20).t()), depth=20, roundings=1),
        Case("first-transposed", "matmul", lambda: (draw(20, 9).t(), draw(20, 11)), depth=20, roundings=1),
        Case("both-transposed", "matmul", lambda: (draw(2, 20, 9).mT, draw(2, 11, 20).mT), depth=20, roundings=1),
        Case("first-transposed-for-all", "matmul", lambda: (draw(2, 20, 9).mT, draw(20, 11)), depth=20, roundings=1),
        Case("strided", "matmul", lambda: (draw(18, 40)[::2, ::2], draw(20, 22)[:, ::2]), depth=20, roundings=1),
        Case("between-nan", "matmul", lambda: tuple(map(between_nan, a_b(33, 65, 17)())), depth=65, roundings=1),
        Case("with-nan", "matmul", lambda: (with_value(draw(4, 30), NAN), draw(30, 5)), depth=30, roundings=1),
        Case("batched", "matmul_vec", lambda: (draw(2, 3, 9, 20), draw(2, 3, 20)), depth=20, roundings=1),
        Case("one-matrix-for-all", "matmul_vec", lambda: (draw(9, 20), draw(2, 3, 20)), depth=20, roundings=1),
        *map(_times_vector, ((1, 1), (7, 13), (257, 130), (3, 4097), (2, 3, 5, 40), (0, 4), (4, 0))),
        *map(_weighted, ((1, 1), (13, 7), (130, 257), (4097, 3), (2, 3, 40, 5), (4, 0), (0, 4))),
    ]


def _times_vector(shape: tuple[int, ...]) -> Case:
    name, depth = "x".join(map(str, shape)), max(shape[-1], 1)
    return Case(name, "matmul_vec", lambda: (draw(*shape), draw(shape[-1])), depth=depth, roundings=1)


def _weighted(shape: tuple[int, ...]) -> Case:
    name, depth = "x".join(map(str, shape)), max(shape[-2], 1)
    return Case(name, "weighted_sum_rows", lambda: (draw(*shape[:-1]), draw(*shape)), depth=depth, roundings=1)


def _attention() -> list[Case]:
    def qkv(b: int, h: int, g: int, t: int, s: int, d: int, e: int = 0) -> Callable[[], tuple[Any, ...]]:
        return lambda: (draw(b, h, t, d), draw(b, g, s, d), draw(b, g, s, e or d))

    def seen(*shape: int) -> Tensor:
        return draw(*shape) > -0.5

    def case(name: str, sizes: tuple[int, ...], **options: Any) -> Case:
        return Case(name, "attention", qkv(*sizes), options, depth=max(sizes[4], sizes[5]), roundings=4)

    blind = seen(2, 1, 6, 9)
    blind[0, 0, 2] = False
    scores = [
        Case("x".join(map(str, s)), "compute_attention_scores", lambda s=s: qkv(*s)()[:2], depth=s[5], roundings=2)
        for s in ((1, 1, 1, 1, 1, 1), (2, 4, 2, 5, 7, 16), (1, 3, 1, 1, 65, 40), (1, 2, 2, 0, 3, 8))
    ]
    return [
        *scores,
        Case("without-heads", "compute_attention_scores", lambda: (draw(5, 8), draw(9, 8)), {"scale": 0.3}, depth=8),
        case("one", (1, 1, 1, 1, 1, 1)),
        case("small", (2, 2, 2, 6, 9, 16)),
        case("primes", (1, 3, 3, 67, 71, 40)),
        case("widths-differ", (1, 2, 2, 5, 9, 24, 48)),
        case("grouped", (2, 6, 2, 5, 33, 32)),
        case("one-head-kept", (1, 5, 1, 3, 17, 64)),
        case("decode", (2, 4, 2, 1, 130, 64)),
        case("causal-square", (1, 2, 2, 65, 65, 64), causal=True),
        case("causal-longer-past", (1, 4, 2, 5, 37, 32), causal=True),
        case("causal-shorter-past", (1, 2, 1, 9, 4, 32), causal=True),
        case("scale", (1, 2, 2, 6, 9, 16), scale=0.7),
        case("bool-mask", (2, 2, 2, 6, 9, 16), mask=seen(2, 2, 6, 9)),
        case("mask-for-all-heads", (2, 4, 2, 6, 9, 16), mask=seen(2, 1, 6, 9)),
        case("padding-mask", (2, 4, 2, 6, 9, 16), mask=seen(2, 1, 1, 9)),
        case("mask-of-two-dimensions", (2, 2, 2, 6, 9, 16), mask=seen(6, 9)),
        case("float-mask", (2, 2, 2, 6, 9, 16), mask=draw(2, 2, 6, 9)),
        case("mask-and-causal", (2, 2, 2, 6, 9, 16), mask=seen(2, 1, 6, 9), causal=True),
        case("a-row-that-sees-nothing", (2, 2, 2, 6, 9, 16), mask=blind),
        case("minus-inf-mask", (2, 2, 2, 6, 9, 16), mask=torch.where(blind, 0.0, -INF)),
        case("nothing-kept", (1, 2, 2, 3, 0, 8)),
        case("nobody-asks", (1, 2, 2, 0, 5, 8)),
        Case("more-dimensions", "attention", lambda: (draw(2, 3, 4, 5, 8), draw(2, 3, 2, 7, 8), draw(2, 3, 2, 7, 8)),
             {"mask": seen(3, 1, 5, 7)}, depth=8, roundings=4),
    ]  # fmt: skip


OFF_BY_ONE_FACTOR = {(name, f"softmax-{size}") for name in ("torch", "auto") for size in ("2x65537", "1x131072")}
"""`auto` leaves these to torch. torch adds the exponentials of a row in as many chains as the CPU's registers have
lanes, 8 with AVX2. The sum of a long row is off by 1e-5 then, and every result with it: great ones by more than
rounding explains. Judged as a vector."""

CASES = (*_norms(), *_variants(), *_gates(), *_ropes(), *_products(), *_attention())


def given(case: Case, dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments as `dtype` has them; their strides stay."""
    return tuple(
        value.to(dtype) if isinstance(value, Tensor) and number not in case.stay else value
        for number, value in enumerate(case.make())
    )


def moved(value: Any, device: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


@cache
def reference() -> Any:
    return create("numpy")


def wanted(case: Case, arguments: tuple[Any, ...]) -> Tensor:
    wide = tuple(v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in arguments)
    options = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in case.options.items()}
    return getattr(reference(), case.operation)(*wide, **options)


_WANTED: dict[tuple[int, torch.dtype], tuple[Case, Tensor]] = {}


def wanted_once(case: Case, arguments: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
    """The reference of a case of CASES is the same for every implementation: a process computes it once."""
    if (id(case), dtype) not in _WANTED:
        _WANTED[id(case), dtype] = case, wanted(case, arguments)  # the case is held, so that its id stays its own
    return _WANTED[id(case), dtype][1]


def check(kernels: Any, case: Case, dtype: torch.dtype) -> None:
    """Raises AssertionError where the result is further from float64 than rounding explains."""
    arguments = given(case, dtype)
    options = {name: moved(value, kernels.device) for name, value in case.options.items()}
    with unwritten_is_nan():
        have = getattr(kernels, case.operation)(*(moved(a, kernels.device) for a in arguments), **options)
    assert have.dtype == dtype
    rounding = accuracy.Rounding(dtype, case.depth, case.roundings)
    as_vector = (kernels.name, str(case)) in OFF_BY_ONE_FACTOR
    judge(kernels, have, wanted_once(case, arguments, dtype), rounding, str(case), as_vector)


@contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """Memory that torch hands out holds NaN: what a kernel forgets may else be the right value of another call."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def judge(
    kernels: Any, have: Tensor, want: Tensor, rounding: accuracy.Rounding, what: str, as_vector: bool = False
) -> None:
    """A value that the dtype cannot hold is infinite in it, and two steps between subnormal numbers are none."""
    assert have.shape == want.shape, what
    if not have.numel():
        return
    have, want = have.cpu(), want.to(rounding.dtype)
    limits = torch.finfo(rounding.dtype)
    least = limits.tiny if kernels.flushes_subnormals else 2 * limits.tiny * limits.eps
    have = torch.where((have.double() - want.double()).abs() <= least, want, have)
    told = accuracy.measure(have, want, rounding, normwise=as_vector)
    assert told["ok"], f"{kernels.name} {what} {rounding.dtype}: {told}"


def rounded_share(kernels: Any, dtype: torch.dtype) -> float:
    """The share of results that are what rounding to nearest makes of float64's; of cut off bits it is a half."""
    x = (draw(64, 1000) * 4).to(dtype)
    want = reference().silu(x.double()).to(dtype)
    return float((kernels.silu(x.to(kernels.device)).cpu() == want).double().mean())
