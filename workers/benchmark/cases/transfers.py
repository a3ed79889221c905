"""Transfers of the catalogue: between host and device, in the device's memory, and between ranks."""

from workers.benchmark.cases.case import FULL, QUICK, Definition, Sizes, zero

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
