"""Pickles of others, read as data: no class is imported and no function called, whatever the file says.

Every global in a pickle becomes a class of our own that only remembers its name and what it was called with. What we
understand (tensors, numpy's arrays and scalars, a few containers) is translated afterwards; the rest is refused by
name. So a hostile file can at worst name things. What it would build is estimated first (pickle_size_estimate.py), and
it is read in a child process with limits and without network all the same.
"""

import io
import pickle
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

from workers.checkpoint.exchange.pickle_size_estimate import MOST_GLOBALS, Unsound, scan
from workers.errors import CheckpointError

LARGEST_BYTES = 256 << 20
"""Of a pickle: the names and numbers of a model, not its tensors."""


class PickledCall:
    """What a pickle wanted to make: `what`(*`arguments`), then given `state`, `items` and `elements`."""

    what = ""

    def __new__(cls, *arguments: Any, **named: Any) -> "PickledCall":
        made = super().__new__(cls)
        made.arguments = arguments + ((named,) if named else ())
        made.state = None
        made.items = {}
        made.elements = []
        return made

    arguments: tuple[Any, ...]
    state: Any
    items: dict[Any, Any]

    def __init__(self, *arguments: Any, **named: Any):
        """All is done: pickles make objects without calling this."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    elements: Any

    def append(self, value: Any) -> None:
        self.elements.append(value)

    def extend(self, values: Any) -> None:
        self.elements.extend(values)


_HARMLESS: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": defaultdict,
    "collections.Counter": Counter,
    **{f"{module}.{kind.__name__}": kind for module in ("builtins", "__builtin__") for kind in (set, frozenset)},
    **{f"{module}.complex": complex for module in ("builtins", "__builtin__")},
}


def name_of(value: Any) -> str:
    """The name of a global that a pickle mentions without calling it; "" for anything else."""
    return value.what if isinstance(value, type) and issubclass(value, PickledCall) else ""


class _Inert(pickle.Unpickler):
    def __init__(self, data: bytes, persistent: Callable[[Any], Any] | None):
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._persistent = persistent
        self._globals: dict[str, Any] = dict(_HARMLESS)

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in self._globals:
            if len(self._globals) > MOST_GLOBALS:
                raise pickle.UnpicklingError(f"it names more than {MOST_GLOBALS} classes and functions")
            self._globals[full] = type("Global", (PickledCall,), {"what": full})
        return self._globals[full]

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("it refers to things outside itself")
        return self._persistent(pid)


def read(data: bytes, where: str, persistent: Callable[[Any], Any] | None = None) -> Any:
    """The values of a pickle, with Calls and Symbols for what it would have run. Raises CheckpointError."""
    if len(data) > LARGEST_BYTES:
        raise CheckpointError(f"{where}: a pickle of {len(data)} bytes", f"at most {LARGEST_BYTES} are read")
    try:
        scan(data)
        return _Inert(data, persistent).load()
    except Unsound as e:
        raise CheckpointError(f"{where} is a pickle that {e}", "no program writes such a file; do not use it") from None
    except CheckpointError:
        raise
    except Exception as e:  # a pickle may be wrong in any way
        raise CheckpointError(
            f"{where} is not a pickle that can be read as data: {e}",
            "check that the file is complete, then run it again",
        ) from e
