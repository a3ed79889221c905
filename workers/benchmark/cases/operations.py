"""Operations and transfers of the catalogue: sizes, and formulas for floating-point operations and bytes.

Letters of sizes: m, k, n of a product; b batch, h query heads, g key heads (by default h), t query tokens, s key
tokens, d width of a head; r rows, c columns; v rows of a table; i, o channels in and out, x image side, f filter side.
"""

from workers.benchmark.cases.case import FULL, QUICK, Definition, Sizes, zero


def _rows(sizes: Sizes) -> str:
    return f"{sizes['r']}x{sizes['c']}"


def _attention_flops(s: Sizes) -> float:
    """Operations of the two products. Of a causal square only the unmasked half counts."""
    pairs = s["t"] * s["s"] if s["t"] != s["s"] else s["t"] * (s["t"] + 1) / 2
    return 4 * s["b"] * s["h"] * pairs * s["d"]


def _attention(s: Sizes) -> str:
    what = "prefill" if s["t"] == s["s"] else "decode"
    groups = f"-g{s['g']}" if "g" in s else ""
    return f"{what}-b{s['b']}-h{s['h']}{groups}-s{s['s']}-d{s['d']}"


def key_heads(s: Sizes) -> int:
    return s.get("g", s["h"])


WIDE = ({"r": 1, "c": 5120}, {"r": 4096, "c": 5120}, {"r": 1024, "c": 131072})
"""Rows that kernels find hard: a single one, a width that is not a power of two, and wider than one program's part."""


def _by_rows(
    name: str, about: str, flops_per_value: float, reads: float, *, depth_of_rows: bool = True, backward: float = 0
) -> Definition:
    """Define an operation on a matrix [r, c] with `reads` memory accesses per value, writes included; `backward` are
    those of its gradients, 0 if they are no case.
    """
    return Definition(
        name, "operation", about,
        flops=lambda s: flops_per_value * s["r"] * s["c"],
        elements=lambda s: reads * s["r"] * s["c"],
        depth=(lambda s: s["c"]) if depth_of_rows else (lambda s: 1),
        roundings=lambda s: 3,
        shapes={
            QUICK: ({"r": 256, "c": 4096},),
            FULL: (*({"r": 4096, "c": c} for c in (1024, 4096, 16384, 65536)), *WIDE),
        },
        variant=_rows, cold=True, backward=(lambda s: backward * s["r"] * s["c"]) if backward else None,
    )  # fmt: skip


OPERATIONS = (
    Definition(
        "matmul", "operation", "a product of two matrices [m, k] and [k, n]",
        flops=lambda s: 2 * s["m"] * s["k"] * s["n"],
        elements=lambda s: s["m"] * s["k"] + s["k"] * s["n"] + s["m"] * s["n"],
        depth=lambda s: s["k"],
        roundings=lambda s: 1,
        shapes={
            QUICK: ({"m": 256, "k": 256, "n": 256}, {"m": 1024, "k": 1024, "n": 1024}, {"m": 8, "k": 2048, "n": 2048}),
            FULL: (
                *({"m": n, "k": n, "n": n} for n in (1024, 2048, 4096, 8192)),
                *({"m": m, "k": 4096, "n": 4096} for m in (1, 16, 128)),
            ),
        },
        variant=lambda s: f"{s['m']}x{s['k']}x{s['n']}",
        backward=lambda s: 2 * (s["m"] * s["k"] + s["k"] * s["n"]) + s["m"] * s["n"],
    ),
    Definition(
        "matmul-vec", "operation", "a product of a matrix [m, k] and a vector [k]",
        flops=lambda s: 2 * s["m"] * s["k"],
        elements=lambda s: s["m"] * s["k"] + s["k"] + s["m"],
        depth=lambda s: s["k"],
        roundings=lambda s: 1,
        shapes={
            QUICK: ({"m": 2048, "k": 2048},),
            FULL: ({"m": 4096, "k": 4096}, {"m": 14336, "k": 4096}, {"m": 128256, "k": 4096}),
        },
        variant=lambda s: f"{s['m']}x{s['k']}", cold=True,
    ),
    Definition(
        "convolution", "operation", "a 2-D convolution of images [b, i, x, x] with filters [o, i, f, f], same padding",
        flops=lambda s: 2 * s["b"] * s["x"] ** 2 * s["o"] * s["i"] * s["f"] ** 2,
        elements=lambda s: s["b"] * s["x"] ** 2 * (s["i"] + s["o"]) + s["o"] * s["i"] * s["f"] ** 2,
        depth=lambda s: s["i"] * s["f"] ** 2,
        roundings=lambda s: 1,
        shapes={
            QUICK: ({"b": 2, "i": 64, "o": 64, "x": 56, "f": 3},),
            FULL: (
                {"b": 32, "i": 64, "o": 64, "x": 56, "f": 3},
                {"b": 32, "i": 256, "o": 256, "x": 14, "f": 3},
                {"b": 32, "i": 256, "o": 1024, "x": 14, "f": 1},
            ),
        },
        variant=lambda s: f"b{s['b']}-{s['i']}to{s['o']}-{s['x']}px-{s['f']}x{s['f']}",
    ),
    Definition(
        "attention", "operation", "scaled dot products: prefill is causal with t = s, decode has one query token",
        flops=_attention_flops,
        elements=lambda s: 2 * s["b"] * s["d"] * (s["h"] * s["t"] + key_heads(s) * s["s"]),
        depth=lambda s: s["s"],
        roundings=lambda s: 3,
        shapes={
            QUICK: (
                {"b": 1, "h": 8, "t": 256, "s": 256, "d": 64},
                {"b": 4, "h": 8, "t": 1, "s": 1024, "d": 64},
            ),
            FULL: (
                *({"b": 2, "h": 32, "t": t, "s": t, "d": 128} for t in (1024, 4096)),
                {"b": 32, "h": 32, "t": 1, "s": 4096, "d": 128},
                {"b": 2, "h": 32, "g": 8, "t": 4096, "s": 4096, "d": 128},
                {"b": 32, "h": 32, "g": 8, "t": 1, "s": 4096, "d": 128},
            ),
        },
        variant=_attention,
        backward=lambda s: 4 * s["b"] * s["d"] * (s["h"] * s["t"] + key_heads(s) * s["s"]),
    ),
    Definition(
        "attention-scores", "operation", "q · k / sqrt(d) of each query and key token",
        flops=lambda s: 2 * s["b"] * s["h"] * s["t"] * s["s"] * s["d"],
        elements=lambda s: s["b"] * s["h"] * (s["d"] * (s["t"] + s["s"]) + s["t"] * s["s"]),
        depth=lambda s: s["d"],
        roundings=lambda s: 2,
        shapes={
            QUICK: ({"b": 4, "h": 8, "t": 1, "s": 1024, "d": 64}, {"b": 1, "h": 8, "t": 256, "s": 256, "d": 64}),
            FULL: ({"b": 32, "h": 32, "t": 1, "s": 4096, "d": 128}, {"b": 2, "h": 32, "t": 1024, "s": 1024, "d": 128}),
        },
        variant=lambda s: f"b{s['b']}-h{s['h']}-t{s['t']}-s{s['s']}-d{s['d']}",
    ),
    Definition(
        "weighted-sum", "operation", "the sum of t rows of [t, c], each with a weight",
        flops=lambda s: 2 * s["t"] * s["c"],
        elements=lambda s: s["t"] + s["t"] * s["c"] + s["c"],
        depth=lambda s: s["t"],
        roundings=lambda s: 1,
        shapes={
            QUICK: ({"t": 2048, "c": 2048},),
            FULL: ({"t": 4096, "c": 128}, {"t": 4096, "c": 4096}, {"t": 65536, "c": 4096}),
        },
        variant=lambda s: f"{s['t']}x{s['c']}", cold=True,
    ),
    _by_rows("rmsnorm", "root-mean-square norm of rows [r, c] with a weight", 4, 2, backward=3),
    _by_rows("layernorm", "layer norm of rows [r, c] with weight and bias", 8, 2, backward=3),
    _by_rows("softmax", "softmax of rows [r, c]", 5, 2, backward=3),
    _by_rows("silu", "x · sigmoid(x) of [r, c]", 4, 2, depth_of_rows=False, backward=3),
    _by_rows("swiglu", "silu(gate) · up, of two matrices [r, c]", 5, 3, depth_of_rows=False, backward=5),
    _by_rows("elementwise", "a · x + y, of two matrices [r, c]", 2, 3, depth_of_rows=False),
    _by_rows("reduction", "the sum of each row of [r, c]", 1, 1),
    Definition(
        "rope", "operation", "rotary position embedding of [b, h, t, d]",
        flops=lambda s: 3 * s["b"] * s["h"] * s["t"] * s["d"],
        elements=lambda s: 2 * s["b"] * s["h"] * s["t"] * s["d"],
        depth=lambda s: 2,
        roundings=lambda s: 3,
        shapes={
            QUICK: ({"b": 1, "h": 8, "t": 512, "d": 64},),
            FULL: ({"b": 4, "h": 32, "t": 4096, "d": 128},),
        },
        variant=lambda s: f"b{s['b']}-h{s['h']}-t{s['t']}-d{s['d']}", cold=True,
        backward=lambda s: 2 * s["b"] * s["h"] * s["t"] * s["d"],
    ),
    Definition(
        "embedding", "operation", "t rows of a table [v, c]",
        flops=zero,
        elements=lambda s: 2 * s["t"] * s["c"],
        depth=lambda s: 1,
        roundings=lambda s: 1,
        shapes={
            QUICK: ({"v": 32000, "c": 512, "t": 2048},),
            FULL: ({"v": 128256, "c": 4096, "t": 16384},),
        },
        variant=lambda s: f"v{s['v']}-c{s['c']}-t{s['t']}", index_bytes=lambda s: 8 * s["t"], cold=True,
    ),
    Definition(
        "cross-entropy", "operation", "mean cross-entropy of logits [t, v] in float32",
        flops=lambda s: 5 * s["t"] * s["v"],
        elements=lambda s: s["t"] * s["v"],
        depth=lambda s: s["v"],
        roundings=lambda s: 1,
        shapes={
            QUICK: ({"t": 128, "v": 32000},),
            FULL: ({"t": 8192, "v": 128256},),
        },
        variant=lambda s: f"t{s['t']}-v{s['v']}", index_bytes=lambda s: 8 * s["t"], cold=True,
    ),
)  # fmt: skip
KERNEL_OPERATIONS = (
    *("matmul", "matmul-vec", "attention", "attention-scores", "weighted-sum"),
    *("rmsnorm", "layernorm", "softmax", "silu", "swiglu", "rope"),
)
"""Operations that kernels implement (workers/kernels): the suite `kernels`."""


MIB = 1 << 20
_SHAPES = {QUICK: ({"bytes": 64 * MIB},), FULL: ({"bytes": 16 * MIB}, {"bytes": 256 * MIB})}
_RANKS = {
    QUICK: ({"bytes": 4 * MIB, "ranks": 2},),
    FULL: ({"bytes": MIB, "ranks": 2}, {"bytes": 256 * MIB, "ranks": 2}),
}


def _size(sizes: Sizes) -> str:
    return f"{sizes['bytes'] // MIB}MiB" + (f"-{sizes['ranks']}ranks" if "ranks" in sizes else "")


def _moves(name: str, about: str, times: float, collective: bool = False) -> Definition:
    """Define a transfer that moves each byte `times` times. Sizes are bytes of float32, whatever the precision."""
    return Definition(
        name, "transfer", about,
        flops=zero, elements=zero, depth=lambda s: 1, roundings=lambda s: 1,
        index_bytes=lambda s: times * s["bytes"] * (2 * (s["ranks"] - 1) / s["ranks"] if collective else 1),
        shapes=_RANKS if collective else _SHAPES, variant=_size,
    )  # fmt: skip


TRANSFERS = (
    _moves("memory-copy", "a copy inside the device's memory, read and written", 2),
    _moves("host-to-device", "from the host's memory, pinned where that exists, to the device", 1),
    _moves("device-to-host", "from the device to the host's memory", 1),
    _moves("all-reduce", "a sum over the ranks of one island; bytes as a ring moves them", 1, collective=True),
    _moves("all-gather", "every rank's part to all ranks of one island", 0.5, collective=True),
)
COLLECTIVES = ("all-reduce", "all-gather")
