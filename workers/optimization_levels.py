"""How far an optimisation may go: four levels, with the names that users of other libraries know them by."""

from enum import StrEnum

from cluster.errors import UserError, nearest


class OptimizationLevel(StrEnum):
    """O0 placement only. O1 numerically safe. O2 adds the compiler. O3 adds what this device offers beyond."""

    O0 = "O0"
    O1 = "O1"
    O2 = "O2"
    O3 = "O3"

    @classmethod
    def from_string(cls, word: "str | OptimizationLevel") -> "OptimizationLevel":
        """`O2`, `o2`, `balanced` or a level itself. Raises UserError naming the nearest."""
        if isinstance(word, cls):
            return word
        if not isinstance(word, str):
            raise UserError(f"{word!r} is no optimisation level", f"use one of {', '.join(LEVELS)}")
        said = word.strip().lower()
        for level in cls:
            if said in (level.value.lower(), ALIASES[level]):
                return level
        raise UserError(
            f"unknown optimisation level {word!r}",
            nearest(said if said.isalpha() else said.upper(), LEVELS + tuple(ALIASES.values())),
        )


ALIASES = {
    OptimizationLevel.O0: "none",
    OptimizationLevel.O1: "conservative",
    OptimizationLevel.O2: "balanced",
    OptimizationLevel.O3: "aggressive",
}
LEVELS = tuple(level.value for level in OptimizationLevel)
