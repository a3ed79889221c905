"""Boxes of a tensor: where a shard begins and how large it is, in elements of the global tensor. Pure integers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


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


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def tiles(outer: Box, boxes: Sequence[Box]) -> str:
    """ "" where `boxes` cover `outer` exactly once, else what is wrong.

    A sweep along the first dimension keeps a few thousand shards cheap: only boxes that share rows are compared.
    """
    boxes = sorted((box for box in boxes if box.count), key=lambda box: box.start)
    open_: list[Box] = []
    for box in boxes:
        open_ = [other for other in open_ if not box.start or other.end[0] > box.start[0]]
        for other in open_:
            if box.meets(other):
                return f"has shards that overlap, from {list(other.start)} and from {list(box.start)} on"
        open_.append(box)
    held = sum(box.count for box in boxes)
    return "" if held == outer.count else f"has shards with {held} of its {outer.count} values"


def box_from(value: object, shape: tuple[int, ...]) -> Box:
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
