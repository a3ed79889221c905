"""A case: one workload of stated shape, with its operations and bytes as formulas. Plain data, without torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

FULL, QUICK = "full", "quick"
SCALES = (FULL, QUICK)
Sizes = Mapping[str, int]
Formula = Callable[[Sizes], float]


def zero(sizes: Sizes) -> float:
    """A formula for what a workload does not have, such as operations of a copy."""
    return 0.0


@dataclass(frozen=True, slots=True)
class Definition:
    """What a workload computes, for any sizes.

    `flops` counts the floating-point operations of one call, `elements` the values that must cross the device's memory
    at least once, in the precision measured, `index_bytes` what crosses it in a dtype of its own, such as token ids.
    `depth` is the length of the longest chain of additions and `roundings` how many results follow upon each other:
    errors grow with their roots. `item` names what one call processes `items` of. `cold` says that the regime of cold
    caches is measured, too.
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


@dataclass(frozen=True, slots=True)
class Case:
    """A definition at given sizes: `matmul/1024`. `mode` is "forward" or, for models, "train"."""

    definition: Definition
    sizes: Mapping[str, int]
    mode: str = "forward"

    @property
    def name(self) -> str:
        """Of an operation its name and shape; of a model its name, what it does, and its shape."""
        variant = self.definition.variant(self.sizes)
        middle = f"/{self.mode}" if self.definition.family == "model" else ""
        return f"{self.definition.name}{middle}/{variant}"

    @property
    def flops(self) -> float:
        """A training step counts three forwards: the backward computes two products for each one of the forward."""
        return self.definition.flops(self.sizes) * (3 if self.mode == "train" else 1)

    def bytes(self, itemsize: int) -> float:
        """At least crossing memory in one call. Training reads weights and activations again and writes gradients."""
        moved = self.definition.elements(self.sizes) * itemsize + self.definition.index_bytes(self.sizes)
        return moved * (3 if self.mode == "train" else 1)

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
