"""Lists of names in messages: a model has thousands of tensors, a sentence has room for three."""

from collections.abc import Collection
from difflib import get_close_matches
from itertools import islice


def few(names: Collection[str], separator: str = ", ") -> str:
    """The first three, and how many more."""
    more = f"{separator}and {len(names) - 3} more" if len(names) > 3 else ""
    return separator.join(islice(names, 3)) + more


def closest(word: str, names: Collection[str]) -> str:
    """The remedy for an unknown name."""
    close = get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"there are: {few(names) or 'none'}"
