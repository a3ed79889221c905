"""Lists of names in messages: a model has thousands of tensors, a sentence has room for three."""

from collections.abc import Collection
from difflib import get_close_matches
from itertools import islice
from reprlib import Repr
from typing import Any

_SHORT = Repr()
_SHORT.maxtuple = _SHORT.maxfrozenset = 20
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200


def first_names(names: Collection[str], separator: str = ", ") -> str:
    """The first three, and how many more."""
    more = f"{separator}and {len(names) - 3} more" if len(names) > 3 else ""
    return separator.join(islice(names, 3)) + more


def closest(word: str, names: Collection[str]) -> str:
    """The remedy for an unknown name."""
    close = get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"there are: {first_names(names) or 'none'}"


def key_text(key: Any) -> str:
    """A key of a stranger's dict, for a message or a name. Python refuses to write integers of thousands of digits, and
    a text, or a tuple of tuples, may be as long as it likes."""
    if isinstance(key, int) and key.bit_length() > 64:
        return f"(a number of {key.bit_length()} bits)"
    if isinstance(key, str):
        return key[:1000]
    return _SHORT.repr(key) if isinstance(key, tuple | frozenset | bytes) else str(key)
