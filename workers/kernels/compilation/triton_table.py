"""Choose the form and the blocks of a kernel for a width of rows and a target.

This is a table, not a search at the first call, so that all ranks and all runs use the same. Does not import Triton.
Only configurations that resources.py compiled without spills may be launched:
`sources/resources.json` contains the numbers of each.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cluster.errors import UserError, nearest

KIB = 1024
NORMS, BACKWARD = "triton_norms", "triton_norms_backward"
CLUSTERS = "triton_clusters"
GATES, PRODUCTS, ATTENTION = "triton_gates", "triton_products", "triton_attention"
ATTENTION_KERNELS = ("attention", "attention_backward_q", "attention_backward_kv")
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
    **dict.fromkeys(ATTENTION_KERNELS, (ATTENTION, ("BLOCK_T", "BLOCK_S", "BLOCK_D", "BLOCK_E"))),
    "attention_delta": (ATTENTION, ("BLOCK_R", "BLOCK_E")),
}
"""Module of each kernel, and the names of its blocks in the order of Config.blocks."""


class CompileTarget(NamedTuple):
    """A kind of device to compile for, with its limits per program. `units`: the kind of its matrix units, named after
    the first generation that had it; `clusters`: programs can share memory.

    Sources: the tables of compute capabilities in the CUDA C++ Programming Guide (registers per thread, shared memory
    per block); AMD's instruction set manuals of CDNA 3, CDNA 4 and RDNA 3 (VGPRs, LDS per work-group).
    """

    name: str
    vendor: str
    units: str
    lanes: int
    shared_bytes: int
    registers: int = 255
    threads: int = 1024
    clusters: bool = False

    def refusal_reason(self, registers: int, spills: int, shared_bytes: int) -> str:
        """Return why a program with these numbers must not be launched here, or ""."""
        if spills:
            return f"spills {spills} registers"
        if registers > self.registers:
            return f"{registers} registers per thread; {self.name} has {self.registers}"
        if shared_bytes > self.shared_bytes:
            return f"{shared_bytes} bytes of shared memory; {self.name} allows {self.shared_bytes} per program"
        return ""


TARGETS = {
    one.name: one
    for one in (
        CompileTarget("sm_80", "nvidia", "ampere", 32, 163 * KIB),
        CompileTarget("sm_86", "nvidia", "ampere", 32, 99 * KIB),
        CompileTarget("sm_90", "nvidia", "hopper", 32, 227 * KIB, clusters=True),
        CompileTarget("sm_100", "nvidia", "hopper", 32, 227 * KIB, clusters=True),
        CompileTarget("sm_120", "nvidia", "ampere", 32, 99 * KIB),
        CompileTarget("gfx942", "amd", "amd", 64, 64 * KIB, registers=512),
        CompileTarget("gfx950", "amd", "amd", 64, 160 * KIB, registers=512),
        CompileTarget("gfx1100", "amd", "amd", 32, 64 * KIB, registers=256),
        CompileTarget("xpu", "intel", "amd", 32, 64 * KIB, registers=256),
    )
}
COMMITTED = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")
"""Targets in the committed table. Intel's GPUs are not in it: only their driver reports registers."""
CLUSTERS_SINCE = (3, 8)
"""Older versions of Triton fail on a reduction over `num_ctas` (triton#9663)."""
OWN_LINES_BEFORE = (3, 7)
"""Older versions of Triton have lines of their own in the committed table, for targets of NVIDIA."""


@dataclass(frozen=True, slots=True)
class Config:
    """A configuration of a kernel: `blocks` as in KERNELS, warps per program, load stages, programs per cluster."""

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


def target(name: str) -> CompileTarget:
    """Look up a target. Raises UserError, which names the nearest."""
    if name not in TARGETS:
        raise UserError(f"unknown target {name!r}", nearest(name, tuple(TARGETS)))
    return TARGETS[name]


def registers(config: Config, on: CompileTarget) -> int:
    """Maximum registers of a thread, for the number of warps that share a processor's registers.

    NVIDIA: 65,536 per processor. AMD: 512 per lane in each of four units, over which a program's warps are spread.
    """
    if on.vendor == "nvidia":
        return min(on.registers, 65536 // (config.warps * on.lanes))
    return on.registers // max(1, config.warps // 4)


def round_up_width(count: int, least: int = 128) -> int:
    """Round up to a power of two of at least `least`."""
    return max(least, 1 << max(count - 1, 0).bit_length())


# Rows: norms and softmax. The widest row that fits a program's registers, by operation and target.

MIN_WIDTH = 128
MAX_COLUMNS = {
    "nvidia": {"softmax_backward": 16384, "rmsnorm_backward": 8192, "layernorm_backward": 8192},
    "amd": {"softmax_backward": 16384, "rmsnorm_backward": 8192, "layernorm_backward": 8192},
    "intel": {"softmax_backward": 4096, "rmsnorm_backward": 2048, "layernorm_backward": 2048},
}
ALIGNED = 16
"""For multiples of this, Triton moves 16 bytes per lane; otherwise each value needs an address."""
MAX_UNALIGNED_COLUMNS = {"forward": 1024, "backward": 2048}
MAX_FORWARD_COLUMNS = {"nvidia": 32768, "amd": 32768, "intel": 8192}
PER_CLUSTER_PROGRAM = {"rmsnorm": 16384, "layernorm": 16384, "softmax": 16384, "softmax_backward": 8192}
"""Columns per program of a cluster. Other operations have no such form."""
MAX_CLUSTER_SIZE = 8
"""Larger clusters are not portable (CUDA C++ Programming Guide, "Thread Block Clusters")."""
ONE_TILE = {"forward": 4096, "backward": 1024}
"""Maximum values of a program with several rows."""
MAX_ROWS = {"rmsnorm": 8, "layernorm_backward": 4}
"""More rows in float32 spill on sm_80 (16 of 256), and on sm_100 (8 of 128)."""
LOOP = {"forward": (4096, 8), "backward": (2048, 8)}
"""(values at a time, warps) if a row is read twice."""


def rows(operation: str, columns: int, on: CompileTarget, triton: tuple[int, int]) -> Config:
    """Choose the configuration for rmsnorm, layernorm or softmax, or its `…_backward`; `triton` is the version."""
    width, direction = round_up_width(columns, MIN_WIDTH), "backward" if operation.endswith("_backward") else "forward"
    widest = MAX_COLUMNS[on.vendor].get(operation, MAX_FORWARD_COLUMNS[on.vendor])
    if columns % ALIGNED:
        widest = min(widest, MAX_UNALIGNED_COLUMNS[direction])
    if width <= widest:
        several = max(1, ONE_TILE[direction] // width)
        several = min(several, MAX_ROWS.get(operation, several))
        return Config(f"{operation}_rows", (several, width), _row_warps(several * width, direction, on))
    programs = width // PER_CLUSTER_PROGRAM.get(operation, width)
    if on.clusters and triton >= CLUSTERS_SINCE and 1 < programs <= MAX_CLUSTER_SIZE and not columns % ALIGNED:
        return Config(f"{operation}_cluster", (width,), 16, ctas=programs)
    values, warps = LOOP[direction]
    two = operation in ("rmsnorm_backward", "layernorm_backward")
    return Config(f"{operation}_loop", (2, values // 2) if two else (values,), warps)


def _row_warps(values: int, direction: str, on: CompileTarget) -> int:
    """Choose warps such that a thread has 32 values of a row, or 16 if it also sums gradients."""
    per_thread = 32 if direction == "forward" else 16
    return min(max(values // (per_thread * on.lanes), 4), on.threads // on.lanes)


# Element-wise operations, and rotation.


def gate(kernel: str, itemsize: int, on: CompileTarget) -> Config:
    """Choose a block of 16 bytes per lane of 4 warps."""
    return Config(kernel, (4 * on.lanes * 16 // itemsize,), 4)


def rope(pairs: int) -> Config:
    width = min(round_up_width(pairs, 16), 128)
    return Config("rope", (512 // width, width), 4)


# Products.


def matmul(rows: int, columns: int, depth: int, itemsize: int, on: CompileTarget) -> Config:
    odd = rows % ALIGNED or columns % ALIGNED or depth % ALIGNED
    if itemsize == 4:
        return Config("matmul", (64, 64, 32), 4, 2)
    if rows <= 16:
        return Config("matmul", (16, 64, 64), 4, 2)
    if rows <= 64 or columns <= 64 or odd:
        return Config("matmul", (64, 64, 64), 4, 2)
    return Config("matmul", (128, 128, 64 if on.shared_bytes > 64 * KIB else 32), 8, 2 if on.vendor == "amd" else 3)


def matmul_vec(depth: int) -> Config:
    width = min(round_up_width(depth), 512)
    return Config("matmul_vec", (4096 // width, width), 4)


def weighted_sum_rows(width: int) -> Config:
    across = min(round_up_width(width, 32), 128)
    return Config("weighted_sum_rows", (4096 // across, across), 4)


def add_partials() -> Config:
    return Config("add_partials", (32, 64), 4)


# Attention.

HEADS = (32, 64, 128, 256)
MAX_HEAD_SIZE = HEADS[-1]
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
ALIGNED_16_BIT: dict[str, dict[str, Blocks]] = {
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
"""(widest head, query tokens, key tokens, warps, stages) by matrix unit and kernel, for 16-bit values."""
MASKED_KV = ((64, 32, 32, 8, 2), (128, 32, 32, 8, 2), (256, 16, 32, 8, 2))
MASKED: dict[str, Blocks] = {
    "attention": ((128, 64, 32, 8, 2), (256, 16, 32, 8, 2)),
    "attention_backward_q": ((64, 64, 32, 4, 2), (256, 32, 32, 8, 2)),
    "attention_backward_kv": MASKED_KV,
}
UNALIGNED: dict[str, dict[str, Blocks]] = {
    "hopper": MASKED,
    "ampere": MASKED | {"attention_backward_kv": ((32, 32, 32, 8, 2), (64, 32, 32, 4, 2), *MASKED_KV[1:])},
    "amd": ALIGNED_16_BIT["amd"] | {"attention": ((64, 128, 64, 4, 1), (128, 64, 32, 4, 1), (256, 32, 32, 4, 1))},
}
"""With a mask, whose addresses need registers, or with heads whose rows do not start at multiples of 16 bytes."""


def attention(kernel: str, width: int, values: int, itemsize: int, on: CompileTarget, masked: bool = False) -> Config:
    """`width` of a query head, `values` of its result. Raises UserError for heads wider than MAX_HEAD_SIZE."""
    if max(width, values) > MAX_HEAD_SIZE:
        message = f"heads are {max(width, values)} wide; Triton's kernels support up to {MAX_HEAD_SIZE}"
        raise UserError(message, "use kernels 'torch'")
    widest = round_up_width(max(width, values), 64 if itemsize == 4 else HEADS[0])
    odd = masked or width % 8 or values % 8
    forms = (FLOAT32 if itemsize == 4 else UNALIGNED if odd else ALIGNED_16_BIT)[on.units][kernel]
    query_block, key_block, warps, stages = next(form[1:] for form in forms if widest <= form[0])
    return Config(kernel, (query_block, key_block, widest, widest), warps, stages)


def has_attention_backward(width: int, values: int, itemsize: int) -> bool:
    """Return False for float32 wider than 128: every form spills on sm_90, so torch computes these."""
    return itemsize < 4 or max(width, values) <= 128


def attention_delta(values: int) -> Config:
    width = round_up_width(values, HEADS[0])
    return Config("attention_delta", (2048 // width, width), 4)


# All configurations.

WIDTHS = tuple(1 << n for n in range(7, 21))
WIDTHS_OF_ROPE = (16, 32, 64, 128)


def configs(on: CompileTarget, itemsize: int, triton: tuple[int, int]) -> Iterator[Config]:
    """Yield every configuration that the functions above may return for an item size."""
    result = [
        rows(f"{operation}{suffix}", width, on, triton)
        for operation in ("rmsnorm", "layernorm", "softmax")
        for suffix in ("", "_backward")
        for width in (*WIDTHS, *(each - 1 for each in WIDTHS))
    ]
    result += [gate(one, itemsize, on) for one in ("silu", "swiglu", "silu_backward", "swiglu_backward")]
    result += [rope(width) for width in WIDTHS_OF_ROPE]
    result += [matmul(m, n, 64, itemsize, on) for m in (16, 64, 128) for n in (16, 128)]
    result += [matmul_vec(width) for width in WIDTHS]
    result += [weighted_sum_rows(width) for width in (32, 64, 128)]
    result += [add_partials(), *map(attention_delta, HEADS)]
    result += [
        attention(kernel, width, width, itemsize, on, masked)
        for kernel in ATTENTION_KERNELS
        for width in HEADS
        for masked in (False, True)
        if kernel == "attention" or has_attention_backward(width, width, itemsize)
    ]
    yield from dict.fromkeys(result)
