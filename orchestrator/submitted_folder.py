"""The walk through a submitted folder: which files travel, and what stays behind and is told of."""

import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cluster import archives
from cluster.errors import SpecError, UserError
from orchestrator import ignoring
from orchestrator.ignore_patterns import quoted

GIT = ".git"
"""A folder, or in a worktree or a submodule a file that names one: no part of the code, and it may hold credentials."""
PYCACHE = "__pycache__"
GENERATED_FOLDERS = frozenset({
    PYCACHE, ".venv", "node_modules", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", ".tox",
    ".nox", ".eggs", ".ipynb_checkpoints",
})  # fmt: skip
GENERATED_SUFFIXES = (".pyc", ".swp")
GENERATED_FILES = frozenset({".DS_Store"})
ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")
"""What a virtual environment has, whatever its own name is (PEP 405), and one of conda."""
CORE_DUMP = re.compile(r"(vg)?core(\.[\w-]+)?|.*\.core")
ELF_CORE = 4
"""The type of a core dump. Source: elf(5), ET_CORE; 16-bit field at byte 16."""
SPECIAL = {stat.S_IFSOCK: "socket", stat.S_IFIFO: "pipe", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
MOST_NAMED = 5
MOST_COUNTED = 10_000
"""Files in folders that stay behind: a data set of millions is not walked to tell how many it has."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What stays behind and is told of: files and folders (these end in `/`) by the place they have in the folder;
    `files` counts what is in the folders of `by_git` as well, up to MOST_COUNTED. `generated` is what tools make anew;
    `special` are (what it is, where): links to nothing, sockets and the like, which have no content to send.
    """

    credentials: tuple[str, ...] = ()
    by_git: tuple[str, ...] = ()
    files: int = 0
    generated: tuple[str, ...] = ()
    special: tuple[tuple[str, str], ...] = ()

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
        if self.generated:
            names = [name for name in self.generated if Path(name).name != GIT]
            how = _take_back(names[0]) if names else f"{GIT} is never sent: a job that needs it clones the repository"
            lines.append(
                "left out of the submitted folder, because they are no part of the code:"
                f" {_named(self.generated)}. {how}"
            )
        if self.special:
            shown = tuple(f"{name} ({what})" for name, what in self.special)
            lines.append(
                f"left out of the submitted folder, because they are no files: {_named(shown)}. To send a file in place"
                f" of {self.special[0][0]}, put one there; to leave it out without this line, write"
                f" {quoted(self.special[0][0])} into {ignoring.FILE}"
            )
        return tuple(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _named(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _take_back(name: str) -> str:
    return f"To send {name} all the same, write !{quoted(name)} into {ignoring.FILE}"


def leave_out(name: str) -> str:
    return f"to leave it out, write {quoted(name)} into {ignoring.FILE}"


def send_as_data(path: Path, mount: str) -> str:
    """How a job reaches what is left out; `mount` is where it lies in the folder."""
    mount += "/" if path.is_dir() else ""
    return (
        f"if the job needs it, also add `data: [{{uri: {path}, mount: {mount}}}]` to the job,"
        " or give its command a path that its nodes have"
    )


@dataclass(frozen=True, slots=True)
class Walk:
    """`root` is the submitted folder, without links; the others collect what stays behind, and why."""

    root: Path
    credentials: list[str] = field(default_factory=list)
    by_git: list[tuple[str, Path]] = field(default_factory=list)
    generated: list[str] = field(default_factory=list)
    special: list[tuple[str, str]] = field(default_factory=list)

    def left_out(self) -> LeftOut:
        files = 0
        for name, path in self.by_git:
            files += _files_in(path, MOST_COUNTED - files) if name.endswith("/") else 1
        names = sorted(name for name, _ in self.by_git)
        generated, special = tuple(sorted(self.generated)), tuple(sorted(self.special))
        return LeftOut(tuple(sorted(self.credentials)), tuple(names), min(files, MOST_COUNTED), generated, special)

    def files(
        self, folder: Path, rules: ignoring.Ignored, prefix: str = "", above: tuple[Path, ...] = ()
    ) -> Iterator[tuple[str, Path]]:
        """(name in the archive, file or folder) below `folder`, where `rules` held above it. A folder comes, with a
        slash behind its name, where nothing in it does. `above`: the real folders on the way, to notice circles.
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
            if what := _special(path):  # that `!` in the user's file takes back
                raise SpecError("working_dir", f"{path} is a {what}, which has no content to send", leave_out(name))
            if entry.is_symlink():
                _refuse_link_outside(path, name, self.root)
            if entry.is_dir():
                if path.resolve() in (*above, here):
                    raise SpecError("working_dir", f"{path} is a link to a folder it is in", leave_out(name))
                empty = True
                for found in self.files(path, rules, f"{name}/", (*above, here)):
                    empty = False
                    yield found
                if empty:
                    yield f"{name}/", path
            else:
                yield name, path

    def _stays(self, name: str, entry: "os.DirEntry[str]", rules: ignoring.Ignored) -> bool:
        is_folder, path = _is_folder(entry), Path(entry.path)
        shown = f"{name}/" if is_folder else name
        if (rule := rules.own.match(name, is_folder)) and not (rule.takes_back and entry.name == GIT):
            return not rule.takes_back
        why = rules.why(name, is_folder, entry.is_symlink())
        if _is_generated(entry, is_folder):
            self.generated.append(shown)
        elif why is ignoring.Why.CREDENTIALS:
            self.credentials.append(shown)
        elif why is ignoring.Why.GIT:
            self.by_git.append((shown, path))
        elif what := _special(path):
            self.special.append((name, what))
        else:
            return False
        return True


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


def _is_generated(entry: "os.DirEntry[str]", is_folder: bool) -> bool:
    """Version control, caches, compiled files, environments, editors' and systems' own files, core dumps."""
    if entry.name == GIT:
        return True
    if PYCACHE in Path(entry.path).parent.parts[-1:]:  # its user takes it back, with what is in it
        return False
    if is_folder:
        return entry.name in GENERATED_FOLDERS or any(Path(entry.path, mark).exists() for mark in ENVIRONMENT_MARKS)
    return entry.name.endswith(GENERATED_SUFFIXES) or entry.name in GENERATED_FILES or _is_core_dump(entry)


def _is_core_dump(entry: "os.DirEntry[str]") -> bool:
    if not CORE_DUMP.fullmatch(entry.name) or not entry.is_file():
        return False
    try:
        with Path(entry.path).open("rb") as file:
            head = file.read(18)
    except OSError:
        return False
    kind = int.from_bytes(head[16:18], "big" if head[5:6] == b"\2" else "little")
    return head[:4] == b"\x7fELF" and kind == ELF_CORE


def _special(path: Path) -> str:
    """What `path` is in a word, where there is no content to send: a link to nothing, a socket, …; "" else."""
    try:
        return SPECIAL.get(stat.S_IFMT(path.stat().st_mode), "")
    except (FileNotFoundError, NotADirectoryError):
        return "link to nothing"
    except OSError as e:
        if e.errno == errno.ELOOP:
            return "link to itself"
        raise UserError(f"{path} cannot be read: {e.strerror}", "make it readable, or move it away") from e


def _entries(folder: Path) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as e:
        raise UserError(f"{folder} cannot be read: {e.strerror}", "make it readable, or move it away") from e


def _refuse_link_outside(path: Path, name: str, root: Path) -> None:
    target = path.resolve(strict=True)
    if not target.is_relative_to(root):
        raise SpecError(
            "working_dir",
            f"{path} is a link to {target}, outside the folder",
            f"{leave_out(name)}; {send_as_data(target, name)}",
        )
