"""One card's answer from a vendor's driver or tool, whose fields may be missing or wrong: each costs itself only."""

from collections.abc import Iterable, Mapping
from typing import Any

from cluster.types import Finding

NOTHING = frozenset({"", "n/a", "none", "null", "unknown", "not supported", "[not supported]"})
"""What tools write, in any case, where they know nothing."""


class Answer:
    """`fields` of `card` (the words of a finding) as `source` gave them; anything but a mapping has no fields.

    `missing` are fields that it should have. `invalid` has those that are not what they should be, with what stood
    there, and so has `instead` where that is all of the answer.
    """

    def __init__(self, card: str, source: str, fields: Any):
        self.card, self.source = card, source
        self._fields: Mapping[str, Any] = fields if isinstance(fields, Mapping) else {}
        self.missing: set[str] = set()
        self.invalid: dict[str, str] = {}
        self.instead = "" if isinstance(fields, Mapping) else "nothing" if fields is None else _short(fields)

    @classmethod
    def of(cls, card: str, source: str, fields: Any) -> "Answer":
        """`fields` itself where it is an answer already."""
        return fields if isinstance(fields, Answer) else cls(card, source, fields)

    def number(self, name: str, *, needed: bool = False, at_least: int = 0, at_most: int = 1 << 63) -> int | None:
        """A whole number within these bounds, also as text; else None. One that is left out is a finding only where it
        is `needed`.
        """
        value = self._fields.get(name)
        try:
            read = int(value.strip()) if isinstance(value, str) else int(value)  # type: ignore[arg-type]
        except (ValueError, TypeError, OverflowError):
            read = at_least - 1
        if at_least <= read <= at_most and not isinstance(value, bool):
            return read
        if value is not None:
            self.invalid[name] = _short(value)
        elif needed and not self.instead:
            self.missing.add(name)
        return None

    def text(self, name: str, otherwise: str = "") -> str:
        """`otherwise` where the tool knows nothing, which is no finding."""
        value = self._fields.get(name)
        known = isinstance(value, str | int | float) and str(value).strip().lower() not in NOTHING
        return str(value).strip() if known else otherwise

    @property
    def problem(self) -> str:
        """What its source said that is not usable, or ""."""
        if self.instead:
            return f"{self.source} reported {self.instead} instead of the data of the card"
        values = " and ".join(f"{value} for {name}" for name, value in self.invalid.items())
        kind = "is not a valid number" if len(self.invalid) == 1 else "are not valid numbers"
        missing = [f"{self.source} reported no {name}" for name in sorted(self.missing)]
        return "; ".join([f"{self.source} reported {values}, which {kind}"] * bool(values) + missing)


def findings(backend: str, answers: Iterable[Answer], remedy: str) -> list[Finding]:
    """One for each card of which something could not be read."""
    return [
        Finding("warning", backend, f"{answer.card}: {problem}", remedy)
        for answer in answers
        if (problem := answer.problem)
    ]


def _short(value: Any) -> str:
    return repr(value)[:40]
