"""Which form of a kernel is launched, with which blocks, for rows of a width on a target: a table, not a search at a
first call, so that all ranks and all runs take the same.

Nothing of Triton is imported here. What may be launched is what workers/kernels/resources.py has compiled and found
without spills: `sources/resources.json` has the proof of each line.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cluster.errors import UserError, nearest

KIB = 1024
NORMS, BACKWARD = "triton_norms", "triton_norms_backward"
CLUSTERS = "triton_clusters"
GATES, PRODUCTS, ATTENTION = "triton_gates", "triton_products", "triton_attention"
ATTENDING = ("attention", "attention_backward_q", "attention_backward_kv")
KERNELS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{f"{one}_rows": (NORMS, ("BLOCK_R", "BLOCK_C")) for one in ("rmsnorm", "layernorm", "softmax")},
    **{f"{one}_loop": (NORMS, ("BLOCK_C",)) for one in ("rmsnorm", "layernorm", "softmax")},
    **{f"{one}_backward_rows": (BACKWARD, ("BLOCK_R", "BLOCK_C")) for one in ("rmsnorm", "layernorm", "softmax")},
    **{f"{one}_backward_loop": (BACKWARD, ("BLOCK_R", "BLOCK_C")) for one in ("rmsnorm", "layernorm")},
    "softmax_backward_loop": (BACKWARD, ("BLOCK_C",)),
    **dict.fromkeys(
        (f"{one}_cluster" for one in ("rmsnorm", "layernorm", "softmax", "softmax_backward")), (CLUSTERS, ("BLOCK_C",))
    ),
    "add_partials": (BACKWARD, ("BLOCK_R", "BLOCK_C")),
    **dict.fromkeys(("silu", "swiglu", "silu_backward", "swiglu_backward"), (GATES, ("BLOCK",))),
    "rope": (GATES, ("BLOCK_R", "BLOCK_P")),
    "matmul": (PRODUCTS, ("BLOCK_M", "BLOCK_N", "BLOCK_K")),
    "matmul_vec": (PRODUCTS, ("BLOCK_R", "BLOCK_C")),
    "weighted_sum_rows": (PRODUCTS, ("BLOCK_R", "BLOCK_C")),
    **dict.fromkeys(ATTENDING, (ATTENTION, ("BLOCK_T", "BLOCK_S", "BLOCK_D", "BLOCK_E"))),
    "attention_delta": (ATTENTION, ("BLOCK_R", "BLOCK_E")),
}
"""The file of each kernel, and its blocks in the order of Config.blocks."""


class Target(NamedTuple):
    """A kind of device to compile for, and what a program of it may have. `units`: the kind of its matrix units, by
    the first that had it; `clusters`: programs that share memory.

    Sources: the tables of compute capabilities of the CUDA C++ Programming Guide (registers a thread, shared memory a
    block); AMD's instruction set manuals of CDNA 3, CDNA 4 and RDNA 3 (VGPRs, LDS a work-group).
    """

    name: str
    vendor: str
    units: str
    lanes: int
    shared_bytes: int
    registers: int = 255
    threads: int = 1024
    clusters: bool = False


TARGETS = {
    one.name: one
    for one in (
        Target("sm_80", "nvidia", "ampere", 32, 163 * KIB),
        Target("sm_86", "nvidia", "ampere", 32, 99 * KIB),
        Target("sm_90", "nvidia", "hopper", 32, 227 * KIB, clusters=True),
        Target("sm_100", "nvidia", "hopper", 32, 227 * KIB, clusters=True),
        Target("sm_120", "nvidia", "ampere", 32, 99 * KIB),
        Target("gfx942", "amd", "amd", 64, 64 * KIB, registers=512),
        Target("gfx950", "amd", "amd", 64, 160 * KIB, registers=512),
        Target("gfx1100", "amd", "amd", 32, 64 * KIB, registers=256),
        Target("xpu", "intel", "amd", 32, 64 * KIB, registers=256),
    )
}
COMMITTED = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")
"""Targets whose lines are in the committed table. Intel's registers are known to its driver alone."""
CLUSTERS_SINCE = (3, 8)
"""Before, Triton fails on a reduction over `num_ctas` (triton#9663)."""


@dataclass(frozen=True, slots=True)
class Config:
    """A form of a kernel: `blocks` in the order of KERNELS, warps a program, stages of loads, programs a cluster."""

    kernel: str
    blocks: tuple[int, ...]
    warps: int
    stages: int = 1
    ctas: int = 1

    @property
    def module(self) -> str:
        return KERNELS[self.kernel][0]

    def named(self) -> dict[str, int]:
        return dict(zip(KERNELS[self.kernel][1], self.blocks, strict=True))

    def __str__(self) -> str:
        cluster = f", cluster of {self.ctas}" if self.ctas > 1 else ""
        return f"{self.kernel} {'x'.join(map(str, self.blocks))}, {self.warps} warps, {self.stages} stages{cluster}"


def target(name: str) -> Target:
    """Raises UserError naming the nearest."""
    if name not in TARGETS:
        raise UserError(f"unknown target {name!r}", nearest(name, tuple(TARGETS)))
    return TARGETS[name]


def registers(config: Config, on: Target) -> int:
    """What a thread can have where so many share those of a processor: 65,536 on NVIDIA; on AMD 512 a lane of each of
    its four units, of which a program's warps have a fourth each.
    """
    if on.vendor == "nvidia":
        return min(on.registers, 65536 // (config.warps * on.lanes))
    return on.registers // max(1, config.warps // 4)


def wide(count: int, least: int = 128) -> int:
    """The power of two that holds so many."""
    return max(least, 1 << max(count - 1, 0).bit_length())


# Rows: norms and softmax. The widest row that fits a program's registers, by operation and target.

NARROWEST = 128
WIDEST = {
    "nvidia": {"softmax_backward": 16384, "rmsnorm_backward": 8192, "layernorm_backward": 8192},
    "amd": {"softmax_backward": 16384, "rmsnorm_backward": 8192, "layernorm_backward": 8192},
    "intel": {"softmax_backward": 4096, "rmsnorm_backward": 2048, "layernorm_backward": 2048},
}
ALIGNED = 16
"""Where sizes are a multiple of it Triton is told so, and moves 16 bytes a lane; else each value takes an address."""
WIDEST_ODD = {"forward": 1024, "backward": 2048}
WIDEST_FORWARD = {"nvidia": 32768, "amd": 32768, "intel": 8192}
PER_CLUSTER_PROGRAM = {"rmsnorm": 16384, "layernorm": 16384, "softmax": 16384, "softmax_backward": 8192}
"""Columns that each program of a cluster has; the others have no such form."""
MOST_IN_CLUSTER = 8
"""More are not portable (CUDA C++ Programming Guide, "Thread Block Clusters")."""
ONE_TILE = {"forward": 4096, "backward": 1024}
"""Values of a program that has several rows."""
MOST_ROWS = {"rmsnorm": 8, "layernorm_backward": 4}
"""More of them in float32 spill on sm_80 (16 of 256), and on sm_100 (8 of 128)."""
LOOP = {"forward": (4096, 8), "backward": (2048, 8)}
"""(values at a time, warps) where a row is read twice."""


def rows(operation: str, columns: int, on: Target, triton: tuple[int, int]) -> Config:
    """`operation` is rmsnorm, layernorm or softmax, or its `…_backward`; `triton` its version."""
    width, way = wide(columns, NARROWEST), "backward" if operation.endswith("_backward") else "forward"
    widest = WIDEST[on.vendor].get(operation, WIDEST_FORWARD[on.vendor])
    if columns % ALIGNED:
        widest = min(widest, WIDEST_ODD[way])
    if width <= widest:
        several = max(1, ONE_TILE[way] // width)
        several = min(several, MOST_ROWS.get(operation, several))
        return Config(f"{operation}_rows", (several, width), _row_warps(several * width, way, on))
    programs = width // PER_CLUSTER_PROGRAM.get(operation, width)
    if on.clusters and triton >= CLUSTERS_SINCE and 1 < programs <= MOST_IN_CLUSTER and not columns % ALIGNED:
        return Config(f"{operation}_cluster", (width,), 16, ctas=programs)
    values, warps = LOOP[way]
    two = operation in ("rmsnorm_backward", "layernorm_backward")
    return Config(f"{operation}_loop", (2, values // 2) if two else (values,), warps)


def _row_warps(values: int, way: str, on: Target) -> int:
    """So many that a thread has 32 values of a row, 16 where it adds up gradients too."""
    per_thread = 32 if way == "forward" else 16
    return min(max(values // (per_thread * on.lanes), 4), on.threads // on.lanes)


# Values one by one, and rotation.


def gate(kernel: str, itemsize: int, on: Target) -> Config:
    """16 bytes for each lane."""
    return Config(kernel, (4 * on.lanes * 16 // itemsize,), 4)


def rope(pairs: int) -> Config:
    width = min(wide(pairs, 16), 128)
    return Config("rope", (512 // width, width), 4)


# Products.


def matmul(rows: int, columns: int, depth: int, itemsize: int, on: Target) -> Config:
    odd = rows % ALIGNED or columns % ALIGNED or depth % ALIGNED
    if itemsize == 4:
        return Config("matmul", (64, 64, 32), 4, 2)
    if rows <= 16:
        return Config("matmul", (16, 64, 64), 4, 2)
    if rows <= 64 or columns <= 64 or odd:
        return Config("matmul", (64, 64, 64), 4, 2)
    return Config("matmul", (128, 128, 64 if on.shared_bytes > 64 * KIB else 32), 8, 2 if on.vendor == "amd" else 3)


def matmul_vec(depth: int) -> Config:
    width = min(wide(depth), 512)
    return Config("matmul_vec", (4096 // width, width), 4)


def weighted_sum_rows(width: int) -> Config:
    across = min(wide(width, 32), 128)
    return Config("weighted_sum_rows", (4096 // across, across), 4)


def add_partials() -> Config:
    return Config("add_partials", (32, 64), 4)


# Attention.

HEADS = (32, 64, 128, 256)
WIDEST_HEAD = HEADS[-1]
Blocks = tuple[tuple[int, int, int, int, int], ...]
FLOAT32: dict[str, dict[str, Blocks]] = {
    "hopper": {
        "attention": ((64, 32, 32, 4, 2), (128, 16, 32, 8, 1), (256, 16, 16, 4, 1)),
        "attention_backward_q": ((64, 32, 32, 4, 2), (128, 16, 32, 4, 2)),
        "attention_backward_kv": ((128, 16, 32, 4, 2),),
    },
    "ampere": {
        "attention": ((64, 32, 32, 4, 2), (128, 16, 16, 8, 2), (256, 16, 16, 4, 1)),
        "attention_backward_q": ((64, 32, 16, 4, 2), (128, 16, 16, 4, 2)),
        "attention_backward_kv": ((128, 16, 32, 4, 2),),
    },
    "amd": {
        "attention": ((64, 32, 32, 4, 1), (128, 16, 32, 8, 1), (256, 16, 16, 4, 1)),
        "attention_backward_q": ((64, 32, 32, 4, 1), (128, 16, 32, 4, 1)),
        "attention_backward_kv": ((128, 16, 32, 4, 1),),
    },
}
PLAIN: dict[str, dict[str, Blocks]] = {
    "hopper": {
        "attention": ((64, 128, 64, 8, 2), (128, 128, 64, 8, 2), (256, 64, 32, 8, 2)),
        "attention_backward_q": ((64, 64, 32, 4, 2), (128, 64, 64, 8, 2), (256, 32, 32, 8, 2)),
        "attention_backward_kv": ((64, 64, 64, 8, 2), (128, 32, 64, 8, 2), (256, 16, 32, 8, 2)),
    },
    "ampere": {
        "attention": ((64, 128, 64, 8, 2), (128, 64, 32, 8, 2), (256, 64, 32, 8, 2)),
        "attention_backward_q": ((64, 64, 32, 4, 2), (128, 64, 64, 8, 2), (256, 32, 32, 8, 2)),
        "attention_backward_kv": ((32, 64, 64, 8, 2), (128, 32, 64, 8, 2), (256, 16, 32, 8, 2)),
    },
    "amd": {
        "attention": ((64, 128, 64, 4, 1), (128, 128, 64, 8, 1), (256, 64, 32, 8, 1)),
        "attention_backward_q": ((128, 64, 64, 4, 1), (256, 32, 32, 4, 1)),
        "attention_backward_kv": ((128, 64, 64, 4, 1), (256, 32, 32, 4, 1)),
    },
}
"""(widest head, tokens that ask, tokens kept, warps, stages) by matrix unit and kernel, for values of 16 bits."""
MASKED_KV = ((64, 32, 32, 8, 2), (128, 32, 32, 8, 2), (256, 16, 32, 8, 2))
MASKED: dict[str, Blocks] = {
    "attention": ((128, 64, 32, 8, 2), (256, 16, 32, 8, 2)),
    "attention_backward_q": ((64, 64, 32, 4, 2), (256, 32, 32, 8, 2)),
    "attention_backward_kv": MASKED_KV,
}
ODD: dict[str, dict[str, Blocks]] = {
    "hopper": MASKED,
    "ampere": MASKED | {"attention_backward_kv": ((32, 32, 32, 8, 2), (64, 32, 32, 4, 2), *MASKED_KV[1:])},
    "amd": PLAIN["amd"] | {"attention": ((64, 128, 64, 4, 1), (128, 64, 32, 4, 1), (256, 32, 32, 4, 1))},
}
"""With a mask, whose addresses take registers, or with heads whose rows do not begin at multiples of 16 bytes."""


def attention(kernel: str, width: int, values: int, itemsize: int, on: Target, masked: bool = False) -> Config:
    """`width` of a head that asks, `values` of what it gets. Raises UserError for heads wider than WIDEST_HEAD."""
    if max(width, values) > WIDEST_HEAD:
        told = f"heads are {max(width, values)} wide; Triton's kernels take up to {WIDEST_HEAD}"
        raise UserError(told, "use kernels 'torch'")
    widest = wide(max(width, values), 64 if itemsize == 4 else HEADS[0])
    odd = masked or width % 8 or values % 8
    known = (FLOAT32 if itemsize == 4 else ODD if odd else PLAIN)[on.units][kernel]
    asks, keeps, warps, stages = next(given[1:] for given in known if widest <= given[0])
    return Config(kernel, (asks, keeps, widest, widest), warps, stages)


def has_attention_backward(width: int, values: int, itemsize: int) -> bool:
    """In float32 beyond 128 no form was found that does not spill on sm_90: torch computes these."""
    return itemsize < 4 or max(width, values) <= 128


def attention_delta(values: int) -> Config:
    width = wide(values, HEADS[0])
    return Config("attention_delta", (2048 // width, width), 4)


# All of it.

WIDTHS = tuple(1 << n for n in range(7, 21))
WIDTHS_OF_ROPE = (16, 32, 64, 128)


def configs(on: Target, itemsize: int, triton: tuple[int, int]) -> Iterator[Config]:
    """Every configuration that the functions above may give for values of a size."""
    found = [
        rows(f"{operation}{way}", width, on, triton)
        for operation in ("rmsnorm", "layernorm", "softmax")
        for way in ("", "_backward")
        for width in (*WIDTHS, *(each - 1 for each in WIDTHS))
    ]
    found += [gate(one, itemsize, on) for one in ("silu", "swiglu", "silu_backward", "swiglu_backward")]
    found += [rope(width) for width in WIDTHS_OF_ROPE]
    found += [matmul(m, n, 64, itemsize, on) for m in (16, 64, 128) for n in (16, 128)]
    found += [matmul_vec(width) for width in WIDTHS]
    found += [weighted_sum_rows(width) for width in (32, 64, 128)]
    found += [add_partials(), *map(attention_delta, HEADS)]
    found += [
        attention(kernel, width, width, itemsize, on, masked)
        for kernel in ATTENDING
        for width in HEADS
        for masked in (False, True)
        if kernel == "attention" or has_attention_backward(width, width, itemsize)
    ]
    yield from dict.fromkeys(found)
