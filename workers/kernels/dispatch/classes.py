"""Classes of shapes: a measurement of one shape applies to all shapes of its class, and to no other."""

from collections.abc import Sequence

MIN_COLUMNS, MAX_COLUMNS = 256, 1 << 17


def shape_class(operation: str, shape: Sequence[int], second: Sequence[int] = ()) -> str:
    """Return the class of the first array, and for products and attention also of the second.

    `64+x4096` means 64 or more rows of 2049 to 4096 columns, `1x…` a single row, `2-63x…` 2 to 63 rows.
    """
    if operation in ("matmul", "matmul_vec", "weighted_sum_rows"):
        return _product(operation, shape, second)
    if operation in ("attention", "compute_attention_scores"):
        return f"{'decode' if shape[-2] == 1 else 'prefill'}-s{rounded_up(second[-2])}-d{shape[-1]}"
    columns = shape[-1] if shape else 1
    rows = _product_of(shape[:-1])
    return f"{row_class(rows)}x{rounded_up(columns)}"


def row_class(rows: int) -> str:
    return "1" if rows <= 1 else "2-63" if rows < 64 else "64+"


def rounded_up(size: int) -> int:
    """Round up to a power of two, within the sizes that are distinguished."""
    return min(max(1 << max(size - 1, 0).bit_length(), MIN_COLUMNS), MAX_COLUMNS)


def _product(operation: str, shape: Sequence[int], second: Sequence[int]) -> str:
    if operation == "weighted_sum_rows":
        return f"{rounded_up(second[-2])}x{rounded_up(second[-1])}"
    columns = rounded_up(second[-1]) if operation == "matmul" else 1
    return f"{row_class(_product_of(shape[:-1]))}x{rounded_up(shape[-1])}x{columns}"


def _product_of(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
