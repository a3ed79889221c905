"""Python environments of pools: made once per lock, Python and platform, kept in the user's cache folder.

A virtual environment cannot be moved (its scripts and pyvenv.cfg hold absolute paths), so it is built where it stays.
It counts only once `.complete` is written, last; while it is built, a lock file beside it is held by the builder and by
every process the builder starts. A folder without the mark whose lock is free was left by a crash, and is removed.

    <cache>/environments/<name>-<hash>/            the environment, requirements.txt, .complete
    <cache>/environments/<name>-<hash>.lock|.log   who builds it now; what pip printed
    <cache>/environments/<name>-<hash>.tmp/        downloads while it is built

A recipe with another build of a package for the CPU has two hashes; the first that is there is used.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster import cpu_builds, interpreters, paths, recipes
from cluster.environment_install import InstallFolder, install, interpreter_of
from cluster.errors import Conflict, FleetError, NotFound, UserError, nearest
from cluster.file_lock import exclusive, is_locked, try_exclusive
from cluster.recipes import GB, Recipe

if TYPE_CHECKING:
    from cluster.fleet_spec_fields import EnvironmentSpec

Progress = Callable[[str], None]
MARK = ".complete"
CURRENT = "current"
ELSEWHERE = "free some disk there, or set POLYFLEET_CACHE to a folder on another"


@dataclass(frozen=True, slots=True)
class Environment:
    """One folder of the cache. `state` is ready, building or broken; `current`: made from a built-in lock of today."""

    name: str
    key: str
    path: Path
    state: str
    current: bool
    size_bytes: int = 0
    created_s: float = 0.0


def create(wanted: "str | Recipe | EnvironmentSpec", progress: Progress = lambda line: None) -> Path:
    """The interpreter of an environment, made first if need be (minutes). Two callers at once make it once.

    Raises NotFound for an unknown name, UserError when an interpreter is not there or packages do not install (nothing
    is left behind but the log), FleetError when this machine cannot hold it: disk, system, Python version.
    """
    recipe = recipe_of(wanted)
    if isinstance(recipe, Path):
        return recipe
    if (made := _made(recipe)) is not None:
        return interpreter_of(made)
    if reason := recipe.unsupported():
        raise FleetError(f"environment {recipe.name!r} cannot exist here: {reason}", "leave its pool out of the fleet")
    recipe = cpu_builds.resolve_cpu_build(recipe)
    folder = _folder(recipe)
    try:
        paths.cache_dir(folder.parent.name)
        with exclusive(_lock_file(folder), lambda: progress("another process makes this environment: waiting")) as lock:
            if not _complete(folder):
                _sweep(folder.parent)
                _build(recipe, folder, lock, progress)
    except OSError as e:
        raise FleetError(f"environment {recipe.name!r} cannot be made: {e.strerror}: {e.filename}", ELSEWHERE) from e
    return interpreter_of(folder)


def path(wanted: "str | Recipe | EnvironmentSpec") -> Path:
    """The interpreter of an environment that exists. Raises NotFound where it was not made yet."""
    recipe = recipe_of(wanted)
    if isinstance(recipe, Path):
        return recipe
    if (made := _made(recipe)) is None:
        raise NotFound(f"environment {recipe.name!r} is not made yet", f"run `polyfleet env create {recipe.name}`")
    return interpreter_of(made)


def unsupported_reason(wanted: "str | Recipe | EnvironmentSpec") -> str:
    """Why it cannot be had on this machine, "" when it is there or can be made."""
    try:
        recipe = recipe_of(wanted)
    except UserError as e:
        return e.message
    if isinstance(recipe, Path) or _made(recipe):
        return ""
    if not (recipe.unsupported() or _disk_refusal(recipe)):
        return ""
    # Another index may have packages that need less disk; it is asked only where that decides.
    return recipe.unsupported() or _disk_refusal(cpu_builds.resolve_cpu_build(recipe))


def list_environments() -> list[Environment]:
    """What is in the cache, by name."""
    root = _root()
    today = {one.key for recipe in recipes.built_in().values() for one in recipe.variants}
    return [_described(folder, today) for folder in _folders(root)] if root.is_dir() else []


def remove(name: str) -> list[Path]:
    """Remove the environments called `name` (or the one of that key), older locks' too. Returns their folders.

    Raises NotFound when there is none, Conflict when processes run from one or it is being built.
    """
    found = [e for e in list_environments() if name in (e.name, e.key)]
    if not found:
        raise NotFound(f"no environment {name!r} here", nearest(name, [e.name for e in list_environments()]))
    for environment in found:
        with try_exclusive(_lock_file(environment.path)) as lock:
            if lock is None:
                raise Conflict(
                    f"environment {environment.key} is being built", "wait, or stop the process that builds it"
                )
            if users := _users(environment.path):
                pids = ", ".join(map(str, users))
                raise Conflict(f"environment {environment.key} is used by process {pids}", "run `polyfleet down` first")
            _erase(environment.path)
    return [e.path for e in found]


def recipe_of(wanted: "str | Recipe | EnvironmentSpec") -> Recipe | Path:
    """A recipe to follow, or the interpreter that was named instead."""
    if isinstance(wanted, Recipe):
        return wanted
    if isinstance(wanted, str):
        if wanted not in recipes.NAMES:
            raise NotFound(f"unknown environment {wanted!r}", nearest(wanted, recipes.NAMES))
        return recipes.built_in()[wanted]
    if wanted.lock:
        return recipe_of(wanted.lock)
    if wanted.interpreter:
        return named_interpreter(wanted.interpreter)
    return recipes.from_requirements(wanted.requirements)


def named_interpreter(name: str) -> Path:
    python = Path(sys.executable if name == CURRENT else name)
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise UserError(f"no Python interpreter at {python}", "name the `python` file of an environment that exists")
    if name != CURRENT and (refusal := (found := interpreters.look(python)).refusal):
        raise UserError(f"{python} {refusal}", found.remedy)
    return python


def _root() -> Path:
    return paths.cache() / "environments"


def _folder(recipe: Recipe) -> Path:
    return _root() / recipe.key


def _made(recipe: Recipe) -> Path | None:
    """The folder of the first variant that is there."""
    return next(filter(_complete, map(_folder, recipe.variants)), None)


def _folders(root: Path) -> list[Path]:
    """Folders of environments; one that so far has downloads only counts too."""
    return sorted({path.with_suffix("") for path in root.iterdir() if path.is_dir()})


def _complete(folder: Path) -> bool:
    """Built to its end, and the Python it was made from is still there."""
    return (folder / MARK).is_file() and interpreter_of(folder).exists()


def _described(folder: Path, today: set[str]) -> Environment:
    name = folder.name.rpartition("-")[0]
    if not _complete(folder):
        state = "building" if is_locked(_lock_file(folder)) else "broken"
        return Environment(name, folder.name, folder, state, folder.name in today)
    mark = json.loads((folder / MARK).read_text())
    return Environment(name, folder.name, folder, "ready", folder.name in today, mark["size_bytes"], mark["created_s"])


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _build(recipe: Recipe, folder: Path, lock: int, progress: Progress) -> None:
    _erase(folder)
    if reason := _disk_refusal(recipe):
        raise FleetError(f"environment {recipe.name!r}: {reason}", ELSEWHERE)
    progress(f"making environment {recipe.name!r} ({len(recipe.packages)} to install) in {folder}")
    progress(recipe.extent)
    started_s = time.monotonic()
    temporary = folder.with_name(f"{folder.name}.tmp")
    try:
        install(recipe, InstallFolder(folder, temporary, folder.with_name(f"{folder.name}.log"), lock), progress)
        size_bytes = sum(file.lstat().st_size for file in folder.rglob("*"))
        _write_mark(folder, {"name": recipe.name, "size_bytes": size_bytes, "created_s": time.time()})
    except BaseException:
        _erase(folder)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    progress(f"environment {recipe.name!r} is ready: {size_bytes / GB:.1f} GB, {time.monotonic() - started_s:.0f} s")


def _write_mark(folder: Path, content: dict[str, object]) -> None:
    part = folder / f"{MARK}.part"
    part.write_text(json.dumps(content))
    part.replace(folder / MARK)


def _erase(folder: Path) -> None:
    """The mark goes first: a folder half removed must not count."""
    (folder / MARK).unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)
    shutil.rmtree(folder.with_name(f"{folder.name}.tmp"), ignore_errors=True)


def _sweep(root: Path) -> None:
    """Remove what builders left that were killed: no mark, and nobody holds the lock."""
    for folder in _folders(root):
        with try_exclusive(_lock_file(folder)) as lock:
            if lock is not None and not _complete(folder):
                _erase(folder)


def _disk_refusal(recipe: Recipe) -> str:
    root = _root()
    existing = next(path for path in (root, *root.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free >= recipe.building_bytes:
        return ""
    return f"needs {recipe.building_bytes / GB:.1f} GB of disk while it is made, {existing} has {free / GB:.1f} GB free"


def _users(folder: Path) -> list[int]:
    """Processes started from this environment's interpreter, or from one of its scripts."""
    import psutil  # here: environments are also made on hosts that have nothing but Python

    prefix = f"{folder}{os.sep}"
    return [p.pid for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [""])[0].startswith(prefix)]
