"""Sizes of the blocks that Pallas kernels hold in a TPU's vector memory (VMEM), by a budget in bytes.

Blocks are multiples of a tile (8 x 128 values of 4 bytes, 16 x 128 of 2), or have all rows of an array with fewer. The
last block of a dimension may reach beyond the array, where values are undefined: kernels mask them. Source: "Block
shapes" in Pallas' "TPU details".
"""

from dataclasses import dataclass

from cluster.errors import UserError

LANES = 128
VMEM_LIMIT_BYTES = 16 << 20
"""VMEM that a kernel may use on every TPU since v4, if it requests no more (XLA's default scoped limit)."""
BUDGET_BYTES = 12 << 20
"""VMEM for blocks and their values in float32; the compiler needs the rest for its temporaries."""
BUFFERS = 2
"""Copies of a block: the next one is fetched while one is computed."""
FLOAT32_BYTES = 4
ROW_VALUES = 3
"""Values in float32 that the compiler may hold for each value of a block of rows: input, intermediate, result."""
MAX_ROWS = 256
MAX_VALUES = 1 << 18
"""Limit of a block of rows: more does not hide more latency."""


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Blocks of rows. `single_pass`: a block has all values of a row; else a row is read twice, block by block."""

    rows: int
    width: int
    single_pass: bool
    vmem_bytes: int


@dataclass(frozen=True, slots=True)
class AttentionBlocks:
    """Blocks of query tokens and of key tokens; a block has the full width of a head."""

    queries: int
    keys: int
    vmem_bytes: int


def row_blocks(rows: int, width: int, itemsize: int, vectors: int = 0, budget_bytes: int = BUDGET_BYTES) -> RowBlocks:
    """Return blocks for `rows` x `width` values of `itemsize` bytes beside `vectors` weights of a row in float32.

    Raises UserError if not even one tile fits in the budget.
    """
    fewest = _sublanes(itemsize)
    full = round_up(width, LANES)

    def needed(count: int, wide: int) -> int:
        block = count * wide * (2 * BUFFERS * itemsize + ROW_VALUES * FLOAT32_BYTES)
        sums = 2 * count * LANES * FLOAT32_BYTES
        return block + sums + vectors * BUFFERS * 8 * wide * FLOAT32_BYTES

    if needed(fewest, full) <= budget_bytes:
        if rows < fewest:
            return RowBlocks(rows, full, True, needed(fewest, full))
        count = min(round_up(rows, fewest), MAX_ROWS)
        while count > fewest and (needed(count, full) > budget_bytes or count * full > MAX_VALUES):
            count = round_up(count // 2, fewest)
        return RowBlocks(count, full, True, needed(count, full))
    wide = min(full, 1 << 13)
    while wide > LANES and needed(fewest, wide) > budget_bytes:
        wide = round_up(wide // 2, LANES)
    _require_fits(f"a tile of {fewest} rows", needed(fewest, wide), budget_bytes)
    return RowBlocks(min(rows, fewest), wide, False, needed(fewest, wide))


def attention_blocks(
    queries: int,
    keys: int,
    width: int,
    value_width: int,
    itemsize: int,
    mask_bytes: int = 0,
    budget_bytes: int = BUDGET_BYTES,
) -> AttentionBlocks:
    """Return blocks for heads of `width` and values of `value_width`; `mask_bytes` per value of the mask, 0 for none.

    Raises UserError if the smallest blocks of such heads do not fit in the budget.
    """
    wide, values = round_up(width, LANES), round_up(value_width, LANES)

    def needed(of_queries: int, of_keys: int) -> int:
        buffers = of_queries * (wide + values) * itemsize + of_keys * (wide + values) * itemsize
        buffers += of_queries * LANES * FLOAT32_BYTES + of_queries * of_keys * mask_bytes
        sums = of_queries * (2 * LANES + values) * FLOAT32_BYTES
        temporaries = (3 * of_queries * of_keys + of_queries * values + of_keys * values) * FLOAT32_BYTES
        return BUFFERS * buffers + sums + temporaries

    of_queries = min(round_up(queries, 16), 256)
    of_keys = min(round_up(keys, LANES), 512)
    while needed(of_queries, of_keys) > budget_bytes and (of_queries > 16 or of_keys > LANES):
        if of_keys > LANES and of_keys >= of_queries:
            of_keys = round_up(of_keys // 2, LANES)
        else:
            of_queries = round_up(of_queries // 2, 16)
    _require_fits(f"heads are {width} and {value_width} wide: a block", needed(of_queries, of_keys), budget_bytes)
    return AttentionBlocks(min(queries, of_queries), of_keys, needed(of_queries, of_keys))


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple that is at least `number`, and not 0."""
    return max(-(-number // multiple), 1) * multiple


def _sublanes(itemsize: int) -> int:
    """Return how many rows a tile has."""
    return 8 * FLOAT32_BYTES // itemsize


def _require_fits(what: str, needed_bytes: int, budget_bytes: int) -> None:
    if needed_bytes > budget_bytes:
        raise UserError(
            f"{what} needs {needed_bytes} bytes of VMEM, the budget is {budget_bytes}: it is not launched",
            "use kernels 'torch', or a larger budget (option vmem_bytes) if the TPU has it",
        )
