"""The four optimisation levels, with their names in other libraries."""

from enum import StrEnum

from cluster.errors import UserError, nearest


class OptimizationLevel(StrEnum):
    """O0: placement only.

    O1: numerically safe passes. O2: also the compiler. O3: also features of the device.
    """

    O0 = "O0"
    O1 = "O1"
    O2 = "O2"
    O3 = "O3"

    @classmethod
    def from_string(cls, name: "str | OptimizationLevel") -> "OptimizationLevel":
        """Parse `O2`, `o2`, `balanced` or a level. Raises UserError that names the nearest one."""
        if isinstance(name, cls):
            return name
        if not isinstance(name, str):
            raise UserError(f"{name!r} is not an optimisation level", f"use one of {', '.join(LEVELS)}")
        text = name.strip().lower()
        for level in cls:
            if text in (level.value.lower(), ALIASES[level]):
                return level
        raise UserError(
            f"unknown optimisation level {name!r}",
            nearest(text if text.isalpha() else text.upper(), LEVELS + tuple(ALIASES.values())),
        )


ALIASES = {
    OptimizationLevel.O0: "none",
    OptimizationLevel.O1: "conservative",
    OptimizationLevel.O2: "balanced",
    OptimizationLevel.O3: "aggressive",
}
LEVELS = tuple(level.value for level in OptimizationLevel)
