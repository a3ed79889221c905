"""Finding the user's function: `file.py:function` below the working folder, or `module:function`."""

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
    """The callable `entry` names; `default` is its name where the entry has none. Running the module is part of it.

    What the user's module raises comes through as it is. Raises NotFound for a file, module or name that is not there.
    """
    where, _, name = entry.partition(":")
    name = name or default
    if not where or not name:
        raise UserError(f"entry {entry!r} names no function", "write file.py:function or module:function")
    module = _load_module(where, (folder or Path.cwd()).resolve())
    found = getattr(module, name, None)
    if found is None:
        callables = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise NotFound(f"{where} has no function {name!r}", nearest(name, callables))
    if not callable(found):
        raise UserError(f"{where}:{name} is {type(found).__name__}, not a function", "name a function or a class")
    function: Callable[..., Any] = found
    return function


def check_call(function: Callable[..., Any], entry: str, *names: str) -> None:
    """Raises UserError where `function` cannot be called with arguments of these names, or would not run then.

    A submitted file was looked at before; what decorators and the pool's environment bring is known only here.
    """
    called = f"{entry.rpartition(':')[2]}({', '.join(names)})"
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # of a function in C
        return
    try:
        signature.bind(*names)
    except TypeError as e:
        raise UserError(f"{entry} cannot be called as {called}: {e}", f"write `def {called}:`") from None
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        kind = "async" if inspect.iscoroutinefunction(function) else "a generator"
        raise UserError(f"{entry} is {kind}: calling it does not run it", f"write `def {called}:` without `yield`")


def sibling(entry: str, name: str) -> str:
    """The entry of the function `name` beside that of `entry`."""
    return f"{entry.partition(':')[0]}:{name}"


def _load_module(where: str, folder: Path) -> ModuleType:
    if where.endswith(".py"):
        return _load_file(where, folder)
    _search_first(folder)
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{where}.".startswith(f"{e.name}."):
            raise
        remedy = f"is it in the submitted folder? it has {_python_files(folder)}"
        raise NotFound(f"no module {where!r} here", remedy) from None


def _load_file(where: str, folder: Path) -> ModuleType:
    """Like `python path`: its own folder comes first on the search path. A file already loaded is not run twice."""
    path = (folder / where).resolve()
    if not path.is_file():
        raise NotFound(f"no file {where} in the working folder", f"it has {_python_files(folder)}")
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
