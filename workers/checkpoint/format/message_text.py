"""Shorten names and keys for messages."""

from collections.abc import Collection
from difflib import get_close_matches
from itertools import islice
from reprlib import Repr
from typing import Any

_SHORT = Repr()
_SHORT.maxtuple = _SHORT.maxfrozenset = 20
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200


def first_names(names: Collection[str], separator: str = ", ") -> str:
    """Join the first three names, and say how many more there are."""
    more = f"{separator}and {len(names) - 3} more" if len(names) > 3 else ""
    return separator.join(islice(names, 3)) + more


def closest(name: str, names: Collection[str]) -> str:
    """Return the remedy for an unknown name: the closest name, or the names to choose from."""
    matches = get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {matches[0]!r}?" if matches else f"choose from: {first_names(names) or 'none'}"


def key_text(key: Any) -> str:
    """Return the text of an untrusted dict key, shortened, for a message or a name.
    Python refuses to print integers of thousands of digits, and texts and nested tuples may have any length.
    """
    if isinstance(key, int) and key.bit_length() > 64:
        return f"(a number of {key.bit_length()} bits)"
    if isinstance(key, str):
        return key[:1000]
    return _SHORT.repr(key) if isinstance(key, tuple | frozenset | bytes) else str(key)
