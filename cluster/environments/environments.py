"""Python environments of pools, created once per lock, Python and platform in the user's cache folder.

A virtual environment cannot be moved (its scripts and pyvenv.cfg contain absolute paths), so it is built at its final
path. It is valid only once `.complete` is written, last. During the build, the builder and every process that it starts
hold a lock file beside it. A folder without `.complete` whose lock is free was left by a crash, and is removed.

    <cache>/environments/<name>-<hash>/            the environment, requirements.txt, .complete
    <cache>/environments/<name>-<hash>.lock|.log   lock held during the build; pip's output
    <cache>/environments/<name>-<hash>.tmp/        downloads during the build

A recipe that has a variant with a CPU build has two hashes; the first that exists is used.
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

from cluster import paths
from cluster.environments import cpu_builds, interpreters, recipes
from cluster.environments.environment_install import InstallFolder, install, interpreter_of
from cluster.environments.recipes import GB, Recipe
from cluster.errors import Conflict, FleetError, NotFound, UserError, nearest
from cluster.host.file_lock import exclusive, is_locked, try_exclusive

if TYPE_CHECKING:
    from cluster.environments.environment_spec import EnvironmentSpec

Progress = Callable[[str], None]
MARK = ".complete"
CURRENT = "current"
DISK_REMEDY = "free disk space there, or set POLYFLEET_CACHE to a folder on another disk"


@dataclass(frozen=True, slots=True)
class Environment:
    """One environment in the cache. `state` is ready, building or broken.

    `current`: it was created from the current version of a built-in lock.
    """

    name: str
    key: str
    path: Path
    state: str
    current: bool
    size_bytes: int = 0
    created_s: float = 0.0


def create(environment: "str | Recipe | EnvironmentSpec", progress: Progress = lambda line: None) -> Path:
    """Return the interpreter of an environment; create the environment first if needed, which takes minutes.

    Concurrent callers create it once. Raises NotFound for an unknown name; UserError if an interpreter does not exist
    or packages fail to install (only the log is left); FleetError if this machine cannot have it: disk space, system,
    Python version.
    """
    recipe = recipe_of(environment)
    if isinstance(recipe, Path):
        return recipe
    if (existing := _existing_folder(recipe)) is not None:
        return interpreter_of(existing)
    if reason := recipe.unsupported_reason():
        raise FleetError(f"environment {recipe.name!r} cannot exist here: {reason}", "leave its pool out of the fleet")
    recipe = cpu_builds.resolve_cpu_build(recipe)
    folder = _folder(recipe)
    try:
        paths.cache_dir(folder.parent.name)
        with exclusive(
            _lock_file(folder), lambda: progress("waiting for another process that creates this environment")
        ) as lock:
            if not _is_complete(folder):
                _remove_unfinished(folder.parent)
                _build(recipe, folder, lock, progress)
    except OSError as e:
        raise FleetError(
            f"environment {recipe.name!r} cannot be created: {e.strerror}: {e.filename}", DISK_REMEDY
        ) from e
    return interpreter_of(folder)


def path(environment: "str | Recipe | EnvironmentSpec") -> Path:
    """Return the interpreter of an existing environment. Raises NotFound if it does not exist yet."""
    recipe = recipe_of(environment)
    if isinstance(recipe, Path):
        return recipe
    if (folder := _existing_folder(recipe)) is None:
        raise NotFound(f"environment {recipe.name!r} does not exist yet", f"run `polyfleet env create {recipe.name}`")
    return interpreter_of(folder)


def unsupported_reason(environment: "str | Recipe | EnvironmentSpec") -> str:
    """Return why this machine cannot have the environment; "" if it exists or can be created."""
    try:
        recipe = recipe_of(environment)
    except UserError as e:
        return e.message
    if isinstance(recipe, Path) or _existing_folder(recipe):
        return ""
    if not (recipe.unsupported_reason() or _disk_error(recipe)):
        return ""
    # Another index may have packages that need less disk space; it is queried only if that decides.
    return recipe.unsupported_reason() or _disk_error(cpu_builds.resolve_cpu_build(recipe))


def list_environments() -> list[Environment]:
    """Return the environments in the cache, by name."""
    root = _root()
    current_keys = {variant.key for recipe in recipes.built_in().values() for variant in recipe.variants}
    return [_describe(folder, current_keys) for folder in _folders(root)] if root.is_dir() else []


def remove(name: str) -> list[Path]:
    """Remove the environments with this name, also those of older locks, or the one with this key.

    Returns their folders. Raises NotFound if there is none, Conflict if one is in use or being built.
    """
    matching = [e for e in list_environments() if name in (e.name, e.key)]
    if not matching:
        raise NotFound(f"no environment {name!r} here", nearest(name, [e.name for e in list_environments()]))
    for environment in matching:
        with try_exclusive(_lock_file(environment.path)) as lock:
            if lock is None:
                raise Conflict(
                    f"environment {environment.key} is being built",
                    "wait until it is built, or stop the process that builds it",
                )
            if users := _users(environment.path):
                pids = ", ".join(map(str, users))
                raise Conflict(f"environment {environment.key} is used by process {pids}", "run `polyfleet down` first")
            _erase(environment.path)
    return [e.path for e in matching]


def recipe_of(environment: "str | Recipe | EnvironmentSpec") -> Recipe | Path:
    """Return the recipe of an environment, or the interpreter that it names instead."""
    if isinstance(environment, Recipe):
        return environment
    if isinstance(environment, str):
        if environment not in recipes.NAMES:
            raise NotFound(f"unknown environment {environment!r}", nearest(environment, recipes.NAMES))
        return recipes.built_in()[environment]
    if environment.lock:
        return recipe_of(environment.lock)
    if environment.interpreter:
        return named_interpreter(environment.interpreter)
    return recipes.from_requirements(environment.requirements)


def named_interpreter(name: str) -> Path:
    python = Path(sys.executable if name == CURRENT else name)
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise UserError(f"no Python interpreter at {python}", "name the `python` file of an existing environment")
    if name != CURRENT and (refusal := (interpreter := interpreters.inspect_interpreter(python)).unusable_reason):
        raise UserError(f"{python} {refusal}", interpreter.remedy)
    return python


def _root() -> Path:
    return paths.cache() / "environments"


def _folder(recipe: Recipe) -> Path:
    return _root() / recipe.key


def _existing_folder(recipe: Recipe) -> Path | None:
    """Return the folder of the first variant that exists, or None."""
    return next(filter(_is_complete, map(_folder, recipe.variants)), None)


def _folders(root: Path) -> list[Path]:
    """Return the folders of environments, including those that have only downloads so far."""
    return sorted({path.with_suffix("") for path in root.iterdir() if path.is_dir()})


def _is_complete(folder: Path) -> bool:
    """Return whether the environment is complete and the Python that it was made from still exists."""
    return (folder / MARK).is_file() and interpreter_of(folder).exists()


def _describe(folder: Path, current_keys: set[str]) -> Environment:
    name = folder.name.rpartition("-")[0]
    if not _is_complete(folder):
        state = "building" if is_locked(_lock_file(folder)) else "broken"
        return Environment(name, folder.name, folder, state, folder.name in current_keys)
    mark = json.loads((folder / MARK).read_text())
    return Environment(
        name, folder.name, folder, "ready", folder.name in current_keys, mark["size_bytes"], mark["created_s"]
    )


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _build(recipe: Recipe, folder: Path, lock: int, progress: Progress) -> None:
    _erase(folder)
    if reason := _disk_error(recipe):
        raise FleetError(f"environment {recipe.name!r}: {reason}", DISK_REMEDY)
    progress(f"creating environment {recipe.name!r} ({len(recipe.packages)} to install) in {folder}")
    progress(recipe.download_summary)
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
    """Remove an environment, its mark first, so that a half-removed folder is not valid."""
    (folder / MARK).unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)
    shutil.rmtree(folder.with_name(f"{folder.name}.tmp"), ignore_errors=True)


def _remove_unfinished(root: Path) -> None:
    """Remove folders of builders that were killed: they have no mark, and no process holds the lock."""
    for folder in _folders(root):
        with try_exclusive(_lock_file(folder)) as lock:
            if lock is not None and not _is_complete(folder):
                _erase(folder)


def _disk_error(recipe: Recipe) -> str:
    root = _root()
    existing = next(path for path in (root, *root.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free >= recipe.building_bytes:
        return ""
    return (
        f"needs {recipe.building_bytes / GB:.1f} GB of disk while it is created, {existing} has {free / GB:.1f} GB free"
    )


def _users(folder: Path) -> list[int]:
    """Return the processes that run from this environment's interpreter or one of its scripts."""
    import psutil  # not at the top: environments are also made on hosts that have nothing but Python

    prefix = f"{folder}{os.sep}"
    return [p.pid for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [""])[0].startswith(prefix)]
