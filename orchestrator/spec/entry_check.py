"""Check before submission that a job's entry is in its working folder. The file is parsed, never run.

What cannot be decided without running it (a module of the pool's environment, names from a star import) is left to the
attempt, which raises as clear an error, but later.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from cluster.errors import SpecError, nearest

DYNAMIC = frozenset({"exec", "eval", "globals", "locals", "vars", "setattr", "__getattr__"})
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
LIMIT_BYTES = 4 << 20


def transformers_name(entry: str) -> str:
    """Return `bert` for `transformers:bert`: a model type, or a configuration file; "" for any other entry."""
    where, _, named = entry.partition(":")
    return named if where == "transformers" else ""


def is_in_folder(entry: str) -> bool:
    """Return whether the entry is a file, which the working folder must contain."""
    return entry.partition(":")[0].endswith(".py") or transformers_name(entry).endswith(".json")


def needs_no_folder(entry: str) -> bool:
    """Return whether the entry is a model type of transformers."""
    return bool(transformers_name(entry)) and not is_in_folder(entry)


def check(
    entry: str, folder: Path, field: str = "entry", default: str = "", call: tuple[str, ...] | None = None
) -> None:
    """Raise SpecError if the file of `entry` is not in `folder`, is not Python, has no such function, or has one that
    cannot be called with the arguments in `call` (None: not checked).
    """
    if named := transformers_name(entry):
        _check_configuration(named, folder, field)
        return
    where, _, function = entry.partition(":")
    path = _file(where, folder, field)
    function = function or default
    if path is None or not function or path.stat().st_size > LIMIT_BYTES:
        return
    tree = _parse_file(path, where, field)
    bound = _bound_names(tree)
    if function not in bound and not bound & DYNAMIC:
        functions = [node.name for node in tree.body if isinstance(node, DEFINITIONS) and not node.name.startswith("_")]
        raise SpecError(field, f"{where} has no function {function!r}", nearest(function, functions[:20]))
    if call is not None and not bound & DYNAMIC and (definition := _only_definition(tree, function)):
        _check_call(definition, call, where, field)


def _only_definition(tree: ast.Module, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The function's definition; None if decorators, conditions or other bindings of the name make it ambiguous."""
    if any(isinstance(node, ast.Global) and name in node.names for node in ast.walk(tree)):
        return None
    nodes = [node for node in _scope(tree) if name in _names(node)]
    only = nodes[0] if len(nodes) == 1 and nodes[0] in tree.body else None
    return only if isinstance(only, FUNCTIONS) and not only.decorator_list else None


def _scope(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below `node`, but not those in the body of a function or class there."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (*DEFINITIONS, ast.Lambda)):
            yield from _scope(child)


def _check_call(node: ast.FunctionDef | ast.AsyncFunctionDef, call: tuple[str, ...], where: str, field: str) -> None:
    written = f"{where}:{node.lineno}: def {node.name}({ast.unparse(node.args)[:200]})"
    called = f"{node.name}({', '.join(call)})"
    if not _accepts(node.args, len(call)):
        raise SpecError(field, f"{written} cannot be called as {called}", f"write `def {called}:`")
    if isinstance(node, ast.AsyncFunctionDef):
        remedy = f"write `def {called}:`, and call asyncio.run in it"
        raise SpecError(field, f"{written} is async: calling it does not run it", remedy)
    if any(isinstance(inner, ast.Yield | ast.YieldFrom) for inner in _scope(node)):
        raise SpecError(field, f"{written} has a `yield`: calling it does not run it", "return instead")


def _accepts(arguments: ast.arguments, count: int) -> bool:
    """Return whether the function can be called with `count` positional arguments."""
    positional = len(arguments.posonlyargs) + len(arguments.args)
    missing = any(default is None for default in arguments.kw_defaults)
    return (
        positional - len(arguments.defaults) <= count
        and (count <= positional or arguments.vararg is not None)
        and not missing
    )


def _check_configuration(named: str, folder: Path, field: str) -> None:
    if named.endswith(".json") and not (folder / named).is_file():
        existing = sorted(path.name for path in folder.glob("*.json"))
        raise SpecError(field, f"there is no file {named} in {folder}", nearest(named, existing[:20]))


def _file(where: str, folder: Path, field: str) -> Path | None:
    """The file of `where`; None for a module that is not in the folder, since the pool's environment may have it."""
    if where.endswith(".py"):
        if (folder / where).is_file():
            return folder / where
        existing = sorted(path.name for path in folder.glob("*.py"))
        raise SpecError(field, f"there is no file {where} in {folder}", nearest(where, existing[:20]))
    base = folder.joinpath(*where.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _parse_file(path: Path, where: str, field: str) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (
        SyntaxError,
        ValueError,
        RecursionError,
        MemoryError,
    ) as e:  # ValueError: NUL bytes; RecursionError: nested too deeply
        line = f":{e.lineno}" if isinstance(e, SyntaxError) and e.lineno else ""
        reason = e.msg if isinstance(e, SyntaxError) else e
        raise SpecError(
            field, f"{where}{line}: not valid Python: {reason}", "correct the file: no node could import it"
        ) from None
    except OSError as e:
        raise SpecError(field, f"{path} cannot be read: {e.strerror}", "make it readable") from None


def _bound_names(tree: ast.Module) -> set[str]:
    """Every name the file binds at any depth, and those of DYNAMIC it uses. Errs on the side of too many names."""
    names: set[str] = set()
    for node in ast.walk(tree):
        names |= _names(node)
    return names


def _names(node: ast.AST) -> set[str]:
    if isinstance(node, DEFINITIONS):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {"exec" if a.name == "*" else a.asname or a.name.partition(".")[0] for a in node.names}
    if isinstance(node, ast.Name) and (isinstance(node.ctx, ast.Store) or node.id in DYNAMIC):
        return {node.id}
    return set()
