"""A case: one workload with one shape, and formulas for its operations and bytes. Plain data, without torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

FULL, QUICK = "full", "quick"
SCALES = (FULL, QUICK)
Sizes = Mapping[str, int]
Formula = Callable[[Sizes], float]


def zero(sizes: Sizes) -> float:
    """Formula for a quantity that a workload lacks, such as the operations of a copy."""
    return 0.0


@dataclass(frozen=True, slots=True)
class Definition:
    """A workload for any sizes.

    `flops` counts the floating-point operations of one call; `elements` the values, in the measured precision, that
    must be read from or written to the device's memory at least once; `index_bytes` those of a fixed dtype, such as
    token ids. `depth` is the length of the longest chain of additions and `roundings` the number of successive results:
    errors grow with their square roots. One call processes `items` of the unit `item`. `cold`: cold caches are
    measured too. `backward`: as `elements`, of the gradients of an operation's inputs; None if only its forward is a
    case.
    """

    name: str
    family: str
    about: str
    flops: Formula
    elements: Formula
    depth: Formula
    roundings: Formula
    shapes: Mapping[str, tuple[Mapping[str, int], ...]]
    variant: Callable[[Sizes], str]
    item: str = "call"
    items: Formula = lambda sizes: 1
    index_bytes: Formula = zero
    cold: bool = False
    backward: Formula | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A definition with values for its sizes: `matmul/1024`. `mode` is "forward", for models also "train", for
    operations also "backward".
    """

    definition: Definition
    sizes: Mapping[str, int]
    mode: str = "forward"

    @property
    def name(self) -> str:
        """Name of the case: workload and shape; between them the mode of a model, and `backward` of an operation."""
        variant = self.definition.variant(self.sizes)
        middle = f"/{self.mode}" if self.definition.family == "model" or self.mode != "forward" else ""
        return f"{self.definition.name}{middle}/{variant}"

    @property
    def flops(self) -> float:
        """Operations of one call. A training step counts as three forwards: backward has two products for each one."""
        return self.definition.flops(self.sizes) * {"train": 3, "backward": 2}.get(self.mode, 1)

    def bytes(self, itemsize: int) -> float:
        """Minimum memory traffic of one call. Training reads weights and activations again and writes gradients."""
        if self.mode == "backward" and self.definition.backward is not None:
            return self.definition.backward(self.sizes) * itemsize
        moved = self.definition.elements(self.sizes) * itemsize + self.definition.index_bytes(self.sizes)
        return moved * (3 if self.mode == "train" else 1)

    @property
    def cold(self) -> bool:
        """Whether cold caches are measured too."""
        return self.definition.cold and self.mode == "forward"

    @property
    def depth(self) -> float:
        """Longest chain of additions. A gradient may be summed over any of the sizes."""
        return max(self.sizes.values()) if self.mode == "backward" else self.definition.depth(self.sizes)

    @property
    def roundings(self) -> float:
        """Number of successive results. A gradient has two more: the forward's result, and its gradient."""
        return self.definition.roundings(self.sizes) + (2 if self.mode == "backward" else 0)

    @property
    def items(self) -> float:
        return self.definition.items(self.sizes)

    def to_plain(self) -> dict[str, Any]:
        return {
            "case": self.name,
            "workload": self.definition.name,
            "family": self.definition.family,
            "about": self.definition.about,
            "mode": self.mode,
            "sizes": dict(self.sizes),
            "flops": self.flops,
            "item": self.definition.item,
            "items": self.items,
        }
