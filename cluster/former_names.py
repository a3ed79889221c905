"""Former names of modules and functions, which still work for one version, with a DeprecationWarning."""

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

REMOVED_IN = "0.2.0"


def forward(module: str, target: str, renamed: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """Return the `__getattr__` of a former module, which looks names up in the module `target`.

    `renamed`: former names of functions and their present ones.
    """
    present_names = renamed or {}

    def getattr_of_module(name: str) -> Any:
        present = present_names.get(name, name)
        if present.startswith("_"):  # with a `__path__`, Python would search in the target's folder
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(import_module(target), present)
        message = f"{module}.{name} is deprecated and will be removed in version {REMOVED_IN}: use {target}.{present}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return value

    return getattr_of_module
