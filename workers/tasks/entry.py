"""Load the user's function: `file.py:function` in the working folder, or `module:function`."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from cluster.errors import NotFound, UserError, nearest


def load_function(entry: str, default: str = "", folder: Path | None = None) -> Callable[..., Any]:
    """Return the callable that `entry` names, or `default` in its module. This runs the module.

    Exceptions of the user's module are not caught. Raises NotFound for a missing file, module or name.
    """
    module_name, _, name = entry.partition(":")
    name = name or default
    if not module_name or not name:
        raise UserError(f"entry {entry!r} does not name a function", "write file.py:function or module:function")
    module = _load_module(module_name, (folder or Path.cwd()).resolve())
    member = getattr(module, name, None)
    if member is None:
        callables = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise NotFound(f"{module_name} has no function {name!r}", nearest(name, callables))
    if not callable(member):
        raise UserError(
            f"{module_name}:{name} is {type(member).__name__}, not a function", "give a function or a class"
        )
    function: Callable[..., Any] = member
    return function


def check_call(function: Callable[..., Any], entry: str, *names: str) -> None:
    """Raise UserError if `function` cannot be called with arguments of these names, or if the call would not run it.

    The client already checked the submitted file; the effect of decorators and of the pool's environment shows here.
    """
    call = f"{entry.rpartition(':')[2]}({', '.join(names)})"
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # a function in C has no signature
        return
    try:
        signature.bind(*names)
    except TypeError as e:
        raise UserError(f"{entry} cannot be called as {call}: {e}", f"write `def {call}:`") from None
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        kind = "async" if inspect.iscoroutinefunction(function) else "a generator"
        raise UserError(f"{entry} is {kind}: calling it does not run it", f"write `def {call}:` without `yield`")


def sibling(entry: str, name: str) -> str:
    """Return the entry of function `name` in the same module as `entry`."""
    return f"{entry.partition(':')[0]}:{name}"


def _load_module(module_name: str, folder: Path) -> ModuleType:
    if module_name.endswith(".py"):
        return _load_file(module_name, folder)
    _search_first(folder)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{module_name}.".startswith(f"{e.name}."):
            raise
        remedy = f"check that it is in the submitted folder, which has {_python_files(folder)}"
        raise NotFound(f"no module {module_name!r} here", remedy) from None


def _load_file(filename: str, folder: Path) -> ModuleType:
    """Load a file like `python path`, with its folder first on the search path. A loaded file is not run again."""
    path = (folder / filename).resolve()
    if not path.is_file():
        raise NotFound(f"no file {filename} in the working folder", f"it has {_python_files(folder)}")
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path) and module.__name__ != "__main__":
            return module
    _search_first(path.parent)
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_of_the_user"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _search_first(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _python_files(folder: Path) -> str:
    return ", ".join(sorted(p.name for p in folder.glob("*.py"))) or "no Python file"
