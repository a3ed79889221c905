"""Reply of a vendor's driver or tool about one card. A missing or invalid field does not affect the others."""

from collections.abc import Iterable, Mapping
from typing import Any

from cluster.types import Finding

UNKNOWN_TEXTS = frozenset({"", "n/a", "none", "null", "unknown", "not supported", "[not supported]"})
"""Texts by which tools mark an unknown value, in lower case."""


class CardReply:
    """Fields of one card, as `source` reported them. `card` is its name in findings.

    `missing` collects required fields that are absent, `invalid` fields with invalid values and these values.
    `unexpected` is the reply itself if it is not a mapping.
    """

    def __init__(self, card: str, source: str, fields: Any):
        self.card, self.source = card, source
        self._fields: Mapping[str, Any] = fields if isinstance(fields, Mapping) else {}
        self.missing: set[str] = set()
        self.invalid: dict[str, str] = {}
        self.unexpected = "" if isinstance(fields, Mapping) else "nothing" if fields is None else _short(fields)

    @classmethod
    def of(cls, card: str, source: str, fields: Any) -> "CardReply":
        """Wrap `fields`, unless it is a CardReply already."""
        return fields if isinstance(fields, CardReply) else cls(card, source, fields)

    def number(self, name: str, *, needed: bool = False, at_least: int = 0, at_most: int = 1 << 63) -> int | None:
        """Return an integer within the bounds, also from text; else None.

        An absent field is reported only if it is `needed`.
        """
        value = self._fields.get(name)
        try:
            number = int(value.strip()) if isinstance(value, str) else int(value)  # type: ignore[arg-type]
        except (ValueError, TypeError, OverflowError):
            number = at_least - 1
        if at_least <= number <= at_most and not isinstance(value, bool):
            return number
        if value is not None:
            self.invalid[name] = _short(value)
        elif needed and not self.unexpected:
            self.missing.add(name)
        return None

    def text(self, name: str, otherwise: str = "") -> str:
        """Return a field as text, or `otherwise` if the tool does not know it, which is not reported."""
        value = self._fields.get(name)
        has_value = isinstance(value, str | int | float) and str(value).strip().lower() not in UNKNOWN_TEXTS
        return str(value).strip() if has_value else otherwise

    @property
    def problem(self) -> str:
        """Describe missing and invalid fields, "" if there are none."""
        if self.unexpected:
            return f"{self.source} reported {self.unexpected} instead of the data of the card"
        values = " and ".join(f"{value} for {name}" for name, value in self.invalid.items())
        kind = "is not a valid number" if len(self.invalid) == 1 else "are not valid numbers"
        missing = [f"{self.source} reported no {name}" for name in sorted(self.missing)]
        return "; ".join([f"{self.source} reported {values}, which {kind}"] * bool(values) + missing)


def findings(backend: str, replies: Iterable[CardReply], remedy: str) -> list[Finding]:
    """Make one finding per card that has missing or invalid fields."""
    return [
        Finding("warning", backend, f"{reply.card}: {problem}", remedy)
        for reply in replies
        if (problem := reply.problem)
    ]


def _short(value: Any) -> str:
    return repr(value)[:40]
