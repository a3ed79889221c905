"""Read untrusted pickles as data: no class is imported and no function is called.

Every global in a pickle becomes a class that only records its name and arguments. Supported ones (tensors, numpy's
arrays and scalars, a few containers) are translated afterwards; others are refused by name. So a hostile file can at
worst name things. In addition, its size in memory is estimated first (pickle_size_estimate.py), and it is read in a
child process with limits and without network.
"""

import io
import pickle
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

from workers.checkpoint.exchange.pickles.pickle_size_estimate import MAX_GLOBALS, Unsound, scan
from workers.errors import CheckpointError

MAX_PICKLE_BYTES = 256 << 20
"""Maximum size of a pickle: it has a model's names and numbers, not its tensors."""


class PickledCall:
    """A call recorded from a pickle: `what`(*`arguments`), then set `state`, `items` and `elements`."""

    what = ""

    def __new__(cls, *arguments: Any, **keywords: Any) -> "PickledCall":
        call = super().__new__(cls)
        call.arguments = arguments + ((keywords,) if keywords else ())
        call.state = None
        call.items = {}
        call.elements = []
        return call

    arguments: tuple[Any, ...]
    state: Any
    items: dict[Any, Any]

    def __init__(self, *arguments: Any, **keywords: Any):
        """Do nothing: unpickling creates objects without calling this."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    elements: Any

    def append(self, value: Any) -> None:
        self.elements.append(value)

    def extend(self, values: Any) -> None:
        self.elements.extend(values)


_SAFE_GLOBALS: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": defaultdict,
    "collections.Counter": Counter,
    **{f"{module}.{kind.__name__}": kind for module in ("builtins", "__builtin__") for kind in (set, frozenset)},
    **{f"{module}.complex": complex for module in ("builtins", "__builtin__")},
}


def name_of(value: Any) -> str:
    """Return the name of a global that a pickle mentions without calling it; "" for anything else."""
    return value.what if isinstance(value, type) and issubclass(value, PickledCall) else ""


class _RecordingUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, persistent: Callable[[Any], Any] | None):
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._persistent = persistent
        self._globals: dict[str, Any] = dict(_SAFE_GLOBALS)

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in self._globals:
            if len(self._globals) > MAX_GLOBALS:
                raise pickle.UnpicklingError(f"it names more than {MAX_GLOBALS} classes and functions")
            self._globals[full] = type("Global", (PickledCall,), {"what": full})
        return self._globals[full]

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("it refers to objects outside the pickle")
        return self._persistent(pid)


def read(data: bytes, source: str, persistent: Callable[[Any], Any] | None = None) -> Any:
    """Read a pickle, with PickledCalls for what loading it would run. Raises CheckpointError."""
    if len(data) > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{source}: a pickle of {len(data)} bytes", f"at most {MAX_PICKLE_BYTES} are read")
    try:
        scan(data)
        return _RecordingUnpickler(data, persistent).load()
    except Unsound as e:
        raise CheckpointError(
            f"{source} is a pickle that {e}", "do not use this file: no standard program writes such files"
        ) from None
    except CheckpointError:
        raise
    except Exception as e:  # an invalid pickle may cause any error
        raise CheckpointError(
            f"{source} is not a pickle that can be read as data: {e}",
            "check that the file is complete, then run it again",
        ) from e
