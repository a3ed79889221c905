"""Paths of this node's disk as users write them, POOL:PATH, in all that is told to others: answers and errors."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.errors import PolyfleetError

Roots = Mapping[Path, str]
"""The storage of each pool that is reached from here."""


def with_pool_paths(value: Any, roots: Roots) -> Any:
    """The same plain data; a path below a pool's storage is POOL:PATH wherever it stands in a text."""
    if isinstance(value, dict):
        return {key: with_pool_paths(item, roots) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([with_pool_paths(item, roots) for item in value])
    return _in_pools(value, roots) if isinstance(value, str) else value


@contextmanager
def errors_with_pool_paths(roots: Roots) -> Iterator[None]:
    """Errors of ours leave with such paths. `roots` may still grow inside."""
    try:
        yield
    except PolyfleetError as e:
        raise error_with_pool_paths(e, roots) from None


def error_with_pool_paths(error: PolyfleetError, roots: Roots) -> PolyfleetError:
    """The same error with such paths."""
    return type(error)(*with_pool_paths(error.args, roots))


def _in_pools(text: str, roots: Roots) -> str:
    for root in sorted(roots, key=lambda root: -len(str(root))):  # a storage may lie in another
        text = re.sub(rf"(?<![\w./-]){re.escape(str(root))}(/+|(?![\w./-]))", f"{roots[root]}:", text)
    return text
