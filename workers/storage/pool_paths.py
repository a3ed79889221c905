"""Replace paths of this node's disk in replies and errors by POOL:PATH, as users write them."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.errors import PolyfleetError

Roots = Mapping[Path, str]
"""Pool names by storage folder, for the pools that this node can reach."""


def with_pool_paths(value: Any, roots: Roots) -> Any:
    """Return plain data in which all paths below a pool's storage, anywhere in texts, are POOL:PATH."""
    if isinstance(value, dict):
        return {key: with_pool_paths(item, roots) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([with_pool_paths(item, roots) for item in value])
    return _replace_paths(value, roots) if isinstance(value, str) else value


@contextmanager
def errors_with_pool_paths(roots: Roots) -> Iterator[None]:
    """Convert paths in errors of ours that leave the block. `roots` may be extended inside."""
    try:
        yield
    except PolyfleetError as e:
        raise error_with_pool_paths(e, roots) from None


def error_with_pool_paths(error: PolyfleetError, roots: Roots) -> PolyfleetError:
    """Return the error with paths converted."""
    return type(error)(*with_pool_paths(error.args, roots))


def _replace_paths(text: str, roots: Roots) -> str:
    for root in sorted(roots, key=lambda root: -len(str(root))):  # longest first: a storage may be inside another
        text = re.sub(rf"(?<![\w./-]){re.escape(str(root))}(/+|(?![\w./-]))", f"{roots[root]}:", text)
    return text
