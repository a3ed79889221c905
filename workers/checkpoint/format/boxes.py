"""Boxes of a tensor: where a shard begins and how large it is, in elements of the global tensor. Pure integers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import SystemRandom


@dataclass(frozen=True, slots=True)
class Box:
    """From `start` on, `shape` long, in every dimension. A number (0 dimensions) is a box of one element."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    def holds(self, other: "Box") -> bool:
        """Whether `other` lies inside. False for boxes of another number of dimensions, and for negative sizes."""
        if not len(self.start) == len(other.start) == len(other.shape) or min((0, *other.shape)) < 0:
            return False
        sides = zip(self.start, other.start, other.end, self.end, strict=True)
        return all(a <= b and c <= d for a, b, c, d in sides)

    def meets(self, other: "Box") -> "Box | None":
        """What both have in common; None where that is nothing."""
        start = tuple(map(max, self.start, other.start))
        shape = tuple(min(a, b) - s for a, b, s in zip(self.end, other.end, start, strict=True))
        return Box(start, shape) if min((1, *shape)) > 0 else None

    def within(self, outer: "Box") -> "Box":
        """The same box, its start counted from that of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))


def full_box(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def tiles(outer: Box, boxes: Sequence[Box]) -> str:
    """ "" where `boxes`, each inside `outer`, cover it exactly once, else what is wrong.

    A box is a product of intervals. With a random number h(d, x) for each coordinate x of dimension d, the products of
    h(d, start) - h(d, end) over all dimensions, summed over the boxes, equal that of `outer` where they tile it; where
    they do not, the two are different polynomials in these numbers, and equal with a chance below 64 in 2^61
    (Schwartz and Zippel). So the time is linear in the number of boxes, however they lie, in any number of dimensions.
    """
    boxes = [box for box in boxes if box.count]
    numbers = [_Numbers() for _ in outer.shape]
    if (sum(_signed(box, numbers) for box in boxes) - _signed(outer, numbers)) % _PRIME == 0:
        return ""
    held = sum(box.count for box in boxes)
    pair = _overlapping(sorted(boxes, key=lambda box: box.start)[:_COMPARED])
    if pair is None and held != outer.count:
        return f"has shards with {held} of its {outer.count} values"
    where = f", from {list(pair[0].start)} and from {list(pair[1].start)} on" if pair else ""
    return f"has shards that overlap{where}"


_PRIME = 2**61 - 1
_COMPARED = 256
"""Boxes among which an overlap is looked for, to be named."""
_random = SystemRandom()


class _Numbers(dict[int, int]):
    """One for each coordinate of a dimension, which nobody can know beforehand."""

    def __missing__(self, at: int) -> int:
        self[at] = number = _random.getrandbits(61)
        return number


def _signed(box: Box, numbers: list[_Numbers]) -> int:
    product = 1
    for start, size, known in zip(box.start, box.shape, numbers, strict=True):
        product = product * (known[start] - known[start + size]) % _PRIME
    return product


def _overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    return next(((a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.meets(b)), None)


def parse_box(value: object, shape: tuple[int, ...]) -> Box:
    """The box that slices, integers and `...` cut out of a tensor of `shape`, as indexing does; a step must be 1.

    An integer keeps its dimension, of size 1. Raises ValueError or IndexError, with what was wrong.
    """
    items = list(value) if isinstance(value, tuple) else [value]
    if items.count(Ellipsis) > 1:
        raise IndexError("an index has at most one ellipsis")
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (len(shape) - len(items) + 1)
    if len(items) > len(shape):
        raise IndexError(f"{len(items)} indices for {len(shape)} dimensions")
    items += [slice(None)] * (len(shape) - len(items))
    spans = [_span(item, size) for item, size in zip(items, shape, strict=True)]
    return Box(tuple(a for a, _ in spans), tuple(n for _, n in spans))


def _span(item: object, size: int) -> tuple[int, int]:
    if isinstance(item, slice):
        start, stop, step = item.indices(size)
        if step != 1:
            raise ValueError(f"a slice with step {step}: only whole ranges can be read")
        return start, max(stop - start, 0)
    if not isinstance(item, int) or isinstance(item, bool):
        raise ValueError(f"{item!r} is neither a slice nor a whole number")
    if not -size <= item < size:
        raise IndexError(f"index {item} is out of range for a dimension of {size}")
    return item % size, 1
