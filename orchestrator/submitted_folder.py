"""The walk through a submitted folder: which files travel, and what stays behind and is told of."""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster import archives
from cluster.errors import SpecError, UserError
from orchestrator import ignoring
from orchestrator.ignore_patterns import quoted

GIT = ".git"
"""A folder, or in a worktree or a submodule a file that names one: no part of the code, and it may hold credentials."""
SKIPPED_FOLDERS = frozenset({"__pycache__", ".venv", "node_modules"})
SKIPPED_SUFFIXES = (".pyc",)
MOST_NAMED = 5
MOST_COUNTED = 10_000
"""Files in folders that stay behind: a data set of millions is not walked to tell how many it has."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What stays behind and is told of: files and folders (these end in `/`) by the place they have in the folder;
    `files` counts what is in the folders as well, up to MOST_COUNTED.
    """

    credentials: tuple[str, ...] = ()
    by_git: tuple[str, ...] = ()
    files: int = 0

    @property
    def told(self) -> tuple[str, ...]:
        """A line for each reason; none when all of the folder travels."""
        lines = []
        if self.by_git:
            files = f"at least {self.files:,} files" if self.files >= MOST_COUNTED else _count(self.files, "file")
            lines.append(
                f"left out of the submitted folder, because {ignoring.GIT_FILE} names them: {files}"
                f" ({_named(self.by_git)}). {_take_back(self.by_git[0])}"
            )
        if self.credentials:
            lines.append(
                "left out of the submitted folder, because they may hold credentials:"
                f" {_named(self.credentials)}. {_take_back(self.credentials[0])}"
            )
        return tuple(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _named(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _take_back(name: str) -> str:
    return f"To send {name} all the same, write !{quoted(name)} into {ignoring.FILE}"


@dataclass(frozen=True, slots=True)
class Walk:
    """`root` is the submitted folder, without links; `credentials` and `by_git` collect what stays behind, and why."""

    root: Path
    credentials: list[str]
    by_git: list[tuple[str, Path]]

    def left_out(self) -> LeftOut:
        files = 0
        for name, path in self.by_git:
            files += _files_in(path, MOST_COUNTED - files) if name.endswith("/") else 1
        names = sorted(name for name, _ in self.by_git)
        return LeftOut(tuple(sorted(self.credentials)), tuple(names), min(files, MOST_COUNTED))

    def files(
        self, folder: Path, rules: ignoring.Ignored, prefix: str = "", above: tuple[Path, ...] = ()
    ) -> Iterator[tuple[str, Path]]:
        """(name in the archive, file) below `folder`, where `rules` held above it. `above`: the real folders on the
        way, to notice circles.
        """
        here = folder.resolve()
        if len(above) > archives.MOST_FOLDERS:
            raise SpecError(
                "working_dir",
                f"{prefix[:60]}… lies in more than {archives.MOST_FOLDERS} folders, one in another",
                f"move it away, or name a folder above it in {ignoring.FILE}",
            )
        rules = rules.inside(folder, prefix)
        for entry in _entries(folder):
            path, name = Path(entry.path), prefix + entry.name
            if self._stays(name, entry, rules):
                continue
            if refusal := archives.name_refusal(name):
                raise SpecError("working_dir", f"{str(path)!r} is {refusal}", "rename it")
            if entry.is_symlink():
                _refuse_link_outside(path, self.root)
            if entry.is_dir():
                if path.resolve() in (*above, here):
                    raise SpecError("working_dir", f"{path} is a link to a folder it is in", "remove the link")
                yield from self.files(path, rules, f"{name}/", (*above, here))
            elif not stat.S_ISREG(path.stat().st_mode):
                raise SpecError("working_dir", f"{path} is neither a file nor a folder", "move it away")
            else:
                yield name, path

    def _stays(self, name: str, entry: "os.DirEntry[str]", rules: ignoring.Ignored) -> bool:
        is_folder = _is_folder(entry)
        if entry.name == GIT or (entry.name in SKIPPED_FOLDERS if is_folder else entry.name.endswith(SKIPPED_SUFFIXES)):
            return True
        why = rules.why(name, is_folder, entry.is_symlink())
        shown = f"{name}/" if is_folder else name
        if why is ignoring.Why.CREDENTIALS:
            self.credentials.append(shown)
        elif why is ignoring.Why.GIT:
            self.by_git.append((shown, Path(entry.path)))
        return why is not None


def _files_in(folder: Path, most: int) -> int:
    """How many, links not followed; it stops at `most`."""
    count = 0
    for _, _, names in os.walk(folder):
        count += len(names)
        if count >= most:
            break
    return count


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # links in a circle
        return False


def _entries(folder: Path) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as e:
        raise UserError(f"{folder} cannot be read: {e.strerror}", "make it readable, or move it away") from e


def _refuse_link_outside(path: Path, root: Path) -> None:
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):
        raise SpecError("working_dir", f"{path} is a link to nothing", "remove it") from None
    if not target.is_relative_to(root):
        raise SpecError(
            "working_dir", f"{path} is a link to {target}, outside the folder", "copy the file in, or remove the link"
        )
