"""Boxes of a tensor: start and size of a shard, in elements of the global tensor. Integers only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import SystemRandom


@dataclass(frozen=True, slots=True)
class Box:
    """Part of a tensor: `start` and length `shape` in every dimension. A scalar (0 dimensions) is one element."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    def contains(self, other: "Box") -> bool:
        """Check whether `other` is inside. False if its number of dimensions differs or a size is negative."""
        if not len(self.start) == len(other.start) == len(other.shape) or min((0, *other.shape)) < 0:
            return False
        sides = zip(self.start, other.start, other.end, self.end, strict=True)
        return all(a <= b and c <= d for a, b, c, d in sides)

    def intersection(self, other: "Box") -> "Box | None":
        """Return the intersection of both boxes, or None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        shape = tuple(min(a, b) - s for a, b, s in zip(self.end, other.end, start, strict=True))
        return Box(start, shape) if min((1, *shape)) > 0 else None

    def relative_to(self, outer: "Box") -> "Box":
        """Return the same box with its start relative to that of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))


def full_box(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def tiling_fault(outer: Box, boxes: Sequence[Box]) -> str:
    """Return "" if `boxes`, each inside `outer`, cover it exactly once, else what is wrong.

    A box is a product of intervals. With a random number h(d, x) for each coordinate x of dimension d, the products of
    h(d, start) - h(d, end) over all dimensions, summed over the boxes, equal that of `outer` if they tile it. If they
    do not, the two are different polynomials in these numbers, and equal with a probability below 64 in 2^61 (Schwartz
    and Zippel). So the time is linear in the number of boxes, for any arrangement and number of dimensions.
    """
    boxes = [box for box in boxes if box.count]
    numbers = [_RandomHashes() for _ in outer.shape]
    if (sum(_signed_product(box, numbers) for box in boxes) - _signed_product(outer, numbers)) % _PRIME == 0:
        return ""
    count = sum(box.count for box in boxes)
    pair = _overlapping(sorted(boxes, key=lambda box: box.start)[:_MAX_COMPARED])
    if pair is None and count != outer.count:
        return f"has shards with {count} of its {outer.count} values"
    positions = f", from {list(pair[0].start)} and from {list(pair[1].start)} on" if pair else ""
    return f"has shards that overlap{positions}"


_PRIME = 2**61 - 1
_MAX_COMPARED = 256
"""Number of boxes that are compared pairwise, to name two that overlap."""
_random = SystemRandom()


class _RandomHashes(dict[int, int]):
    """One unpredictable random number for each coordinate of a dimension."""

    def __missing__(self, coordinate: int) -> int:
        self[coordinate] = number = _random.getrandbits(61)
        return number


def _signed_product(box: Box, numbers: list[_RandomHashes]) -> int:
    product = 1
    for start, size, hashes in zip(box.start, box.shape, numbers, strict=True):
        product = product * (hashes[start] - hashes[start + size]) % _PRIME
    return product


def _overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    return next(((a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.intersection(b)), None)


def parse_box(value: object, shape: tuple[int, ...]) -> Box:
    """Return the box that slices, integers and `...` select from a tensor of `shape`; steps must be 1.

    An integer keeps its dimension, with size 1. Raises ValueError or IndexError with the reason.
    """
    items = list(value) if isinstance(value, tuple) else [value]
    if items.count(Ellipsis) > 1:
        raise IndexError("an index has at most one ellipsis")
    if Ellipsis in items:
        index = items.index(Ellipsis)
        items[index : index + 1] = [slice(None)] * (len(shape) - len(items) + 1)
    if len(items) > len(shape):
        raise IndexError(f"{len(items)} indices for {len(shape)} dimensions")
    items += [slice(None)] * (len(shape) - len(items))
    spans = [_span(item, size) for item, size in zip(items, shape, strict=True)]
    return Box(tuple(a for a, _ in spans), tuple(n for _, n in spans))


def _span(item: object, size: int) -> tuple[int, int]:
    if isinstance(item, slice):
        start, stop, step = item.indices(size)
        if step != 1:
            raise ValueError(f"a slice with step {step}: the step must be 1")
        return start, max(stop - start, 0)
    if not isinstance(item, int) or isinstance(item, bool):
        raise ValueError(f"{item!r} is neither a slice nor an integer")
    if not -size <= item < size:
        raise IndexError(f"index {item} is out of range for a dimension of {size}")
    return item % size, 1
