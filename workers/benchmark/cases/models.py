"""Models of the catalogue: sizes, and formulas for operations and bytes. networks.py builds them in plain torch.

Letters of sizes: b batch, t tokens, d width, l layers, h heads, v vocabulary, x image side, p patch side, k classes.
Formulas count products of matrices, two operations per multiply-add, and leave norms and activations out, as torch's
own flop counter does; a test compares both. `elements` are weights and the activations between blocks, each once.
"""

from itertools import pairwise

from workers.benchmark.cases.case import FULL, QUICK, Definition, Sizes

RESNET50 = {"channels": 64, "k": 1000}
_GPT2 = {"d": 768, "l": 12, "h": 12, "v": 50257, "positions": 1024}
_GPT2_QUICK = {"d": 256, "l": 4, "h": 4, "v": 8192, "positions": 1024}
_BERT = {"d": 768, "l": 12, "h": 12, "v": 30522, "positions": 512, "k": 2}
_BERT_QUICK = {"d": 256, "l": 4, "h": 4, "v": 8192, "positions": 512, "k": 2}
_VIT = {"d": 768, "l": 12, "h": 12, "x": 224, "p": 16, "k": 1000}
_VIT_QUICK = {"d": 192, "l": 4, "h": 3, "x": 96, "p": 16, "k": 100}
_DLRM = {"tables": 8, "rows": 100_000, "d": 64, "dense": 13}
_DLRM_QUICK = {"tables": 8, "rows": 10_000, "d": 16, "dense": 13}
_RESNET_BLOCKS = (3, 4, 6, 3)


def mlp_widths(s: Sizes) -> tuple[int, ...]:
    return (s["d"], 4 * s["d"], 4 * s["d"], 4 * s["d"], s["k"])


def dlrm_widths(s: Sizes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Widths of the lower and the upper perceptron; between them every pair of vectors is multiplied."""
    vectors = s["tables"] + 1
    return (s["dense"], 512, 256, s["d"]), (s["d"] + vectors * (vectors - 1) // 2, 512, 256, 1)


def _weights(widths: tuple[int, ...]) -> int:
    return sum(a * b for a, b in pairwise(widths))


def _dlrm_weights(s: Sizes) -> int:
    return sum(map(_weights, dlrm_widths(s)))


def _dlrm_flops(s: Sizes) -> float:
    return 2 * s["b"] * (_dlrm_weights(s) + (s["tables"] + 1) ** 2 * s["d"])


def _block_flops(s: Sizes, queries: float, keys: float) -> float:
    """Operations of all layers for `queries` tokens that attend to `keys`: 12 d² weights per layer, two products.

    The full square of attention counts, masked or not, as in the kernels' own counters.
    """
    return s["l"] * (2 * queries * 12 * s["d"] ** 2 + 4 * queries * keys * s["d"])


def _gpt2_flops(s: Sizes) -> float:
    queries = 1 if "cached" in s else s["t"]
    keys = s["cached"] + 1 if "cached" in s else s["t"]
    return s["b"] * (_block_flops(s, queries, keys) + 2 * queries * s["d"] * s["v"])


def _gpt2_elements(s: Sizes) -> float:
    queries = 1 if "cached" in s else s["t"]
    cached = 2 * s["l"] * s.get("cached", 0) * s["d"]
    return (
        s["l"] * 12 * s["d"] ** 2
        + s["v"] * s["d"]
        + s["b"] * (2 * s["l"] * queries * s["d"] + cached + queries * s["v"])
    )


def _bert_flops(s: Sizes) -> float:
    return s["b"] * (_block_flops(s, s["t"], s["t"]) + 2 * s["d"] * (s["d"] + s["k"]))


def _vit_tokens(s: Sizes) -> int:
    return (s["x"] // s["p"]) ** 2 + 1


def _vit_flops(s: Sizes) -> float:
    tokens = _vit_tokens(s)
    patches = 2 * (tokens - 1) * 3 * s["p"] ** 2 * s["d"]
    return s["b"] * (_block_flops(s, tokens, tokens) + patches + 2 * s["d"] * s["k"])


def _transformer_elements(s: Sizes) -> float:
    tokens = s["t"] if "t" in s else _vit_tokens(s)
    return s["l"] * 12 * s["d"] ** 2 + s["b"] * 2 * s["l"] * tokens * s["d"]


def _roundings(s: Sizes) -> float:
    """Roundings of a transformer: six successive results per layer."""
    return 6 * s["l"]


def _resnet_layers(s: Sizes) -> list[tuple[int, int, int, int]]:
    """(channels in, channels out, filter side, side of the result) of every convolution."""
    width, side = s["channels"], -(-s["x"] // 2)
    layers = [(3, width, 7, side)]
    side, inside = -(-side // 2), width
    for stage, count in enumerate(_RESNET_BLOCKS):
        channels = width << stage
        for block in range(count):
            before, side = side, -(-side // 2) if stage and not block else side
            layers += [(inside, channels, 1, before), (channels, channels, 3, side), (channels, 4 * channels, 1, side)]
            layers += [] if block else [(inside, 4 * channels, 1, side)]
            inside = 4 * channels
    return layers


def _resnet_flops(s: Sizes) -> float:
    convolutions = sum(2 * i * o * f * f * side**2 for i, o, f, side in _resnet_layers(s))
    return s["b"] * (convolutions + 2 * 32 * s["channels"] * s["k"])


def _resnet_elements(s: Sizes) -> float:
    return sum(i * o * f * f + s["b"] * o * side**2 for i, o, f, side in _resnet_layers(s))


def _tokens(s: Sizes) -> str:
    return f"decode-b{s['b']}-s{s['cached']}" if "cached" in s else f"b{s['b']}-t{s['t']}-d{s['d']}"


def _batch(s: Sizes) -> str:
    side = f"-{s['x']}px" if "x" in s else ""
    return f"b{s['b']}{side}" + (f"-d{s['d']}" if "d" in s else "")


MODELS = (
    Definition(
        "mlp", "model", "a perceptron of widths d, 4d, 4d, 4d, k",
        flops=lambda s: 2 * s["b"] * _weights(mlp_widths(s)),
        elements=lambda s: _weights(mlp_widths(s)) + s["b"] * sum(mlp_widths(s)),
        depth=lambda s: 4 * s["d"], roundings=lambda s: 4,
        shapes={QUICK: ({"b": 64, "d": 256, "k": 100},), FULL: ({"b": 256, "d": 1024, "k": 1000},)},
        variant=_batch, item="sample", items=lambda s: s["b"],
    ),
    Definition(
        "resnet50", "model", "ResNet-50, version 1.5 (arXiv:1512.03385), images of x pixels",
        flops=_resnet_flops, elements=_resnet_elements, depth=lambda s: 9 * 8 * s["channels"], roundings=lambda s: 50,
        shapes={QUICK: (RESNET50 | {"b": 8, "x": 64},), FULL: (RESNET50 | {"b": 32, "x": 224},)},
        variant=_batch, item="sample", items=lambda s: s["b"],
    ),
    Definition(
        "vit", "model", "a vision transformer; full is ViT-B/16 (arXiv:2010.11929)",
        flops=_vit_flops, elements=_transformer_elements, depth=lambda s: 4 * s["d"], roundings=_roundings,
        shapes={QUICK: (_VIT_QUICK | {"b": 4},), FULL: (_VIT | {"b": 32},)},
        variant=_batch, item="sample", items=lambda s: s["b"],
    ),
    Definition(
        "gpt2", "model", "a decoder; full has the size of GPT-2 small. `decode` generates one token with s cached",
        flops=_gpt2_flops, elements=_gpt2_elements, depth=lambda s: 4 * s["d"], roundings=_roundings,
        shapes={
            QUICK: (_GPT2_QUICK | {"b": 1, "t": 128}, _GPT2_QUICK | {"b": 4, "cached": 256}),
            FULL: (_GPT2 | {"b": 8, "t": 1024}, _GPT2 | {"b": 32, "cached": 512}),
        },
        variant=_tokens, item="token", items=lambda s: s["b"] * (1 if "cached" in s else s["t"]),
    ),
    Definition(
        "bert", "model", "an encoder with a classifier; full has the size of BERT base",
        flops=_bert_flops, elements=_transformer_elements, depth=lambda s: 4 * s["d"], roundings=_roundings,
        shapes={QUICK: (_BERT_QUICK | {"b": 4, "t": 64},), FULL: (_BERT | {"b": 32, "t": 128},)},
        variant=_tokens, item="sample", items=lambda s: s["b"],
    ),
    Definition(
        "dlrm", "model", "a recommender: tables, products of all pairs, two perceptrons (arXiv:1906.00091)",
        flops=_dlrm_flops,
        elements=lambda s: _dlrm_weights(s) + s["b"] * s["tables"] * s["d"],
        depth=lambda s: 512, roundings=lambda s: 7,
        shapes={QUICK: (_DLRM_QUICK | {"b": 128},), FULL: (_DLRM | {"b": 2048},)},
        variant=_batch, item="sample", items=lambda s: s["b"], index_bytes=lambda s: 8 * s["b"] * s["tables"],
    ),
)  # fmt: skip
