"""The walk through a submitted folder: which files, folders and links travel, and what stays behind and is told of."""

import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from cluster import archive_checks
from cluster.archive_links import Tree
from cluster.errors import SpecError, UserError
from orchestrator import ignore_file
from orchestrator.excluded_files import GIT, MOST_COUNTED, LeftOut, leave_out, send_as_data

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


@dataclass(frozen=True, slots=True)
class Entry:
    """One of the archive. `name` has a slash behind it for a folder in which nothing comes; `link` is what a link says,
    "" for what is none.
    """

    name: str
    path: Path
    link: str = ""

    @property
    def has_content(self) -> bool:
        return not (self.link or self.name.endswith("/"))


@dataclass(frozen=True, slots=True)
class _Link:
    """Met on the walk. `rules` hold where it lies, in the real folders `above`."""

    name: str
    path: Path
    rules: ignore_file.Ignored
    above: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Walk:
    """`root` is the submitted folder, without links. A link named in `copied` comes as a copy of what it leads to. The
    others collect what stays behind, and why.
    """

    root: Path
    copied: tuple[str, ...] = ()
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

    def entries(self, folder: Path, rules: ignore_file.Ignored) -> Iterator[Entry]:
        """All that travels of `folder`. A link comes as a link where the names that travel show it to be safe. It comes
        as a copy where it is absolute, leads through another link, or to what stays behind.
        """
        names: list[str] = []
        links: dict[str, str] = {}
        met: list[_Link] = []
        todo: list[Iterator[Entry]] = [self._files(folder, rules, met)]
        while todo:
            for entry in chain.from_iterable(todo):
                names.append(entry.name)
                yield entry
            new = {link.name: str(link.path.readlink()) for link in met if link.name not in self.copied}
            tree, todo, followed = Tree(names, links | new), [], met.copy()
            met.clear()  # the walks of the next round fill it
            for link in followed:
                if link.name in new and not tree.refusal(link.name):
                    links[link.name] = new[link.name]
                    yield Entry(link.name, link.path, new[link.name])
                else:
                    todo.append(self._through(link, met))

    def _through(self, link: _Link, met: list[_Link]) -> Iterator[Entry]:
        """What comes in the place of a link that does not come itself."""
        if not link.path.is_dir():
            yield Entry(link.name, link.path)
            return
        if link.path.resolve() in link.above:
            raise SpecError("working_dir", f"{link.path} is a link to a folder it is in", leave_out(link.name))
        yield from self._files(link.path, link.rules, met, f"{link.name}/", link.above)

    def _files(
        self, folder: Path, rules: ignore_file.Ignored, met: list[_Link], prefix: str = "", above: tuple[Path, ...] = ()
    ) -> Iterator[Entry]:
        """Files below `folder`, where `rules` held above it; or the folder itself where nothing in it comes. Links are
        put into `met`. `above`: the real folders on the way, to notice circles.
        """
        above = (*above, folder.resolve())
        if len(above) - 1 > archive_checks.MOST_FOLDERS:
            raise SpecError(
                "working_dir",
                f"{prefix[:60]}… lies in more than {archive_checks.MOST_FOLDERS} folders, one in another",
                f"move it away, or name a folder above it in {ignore_file.FILE}",
            )
        rules, empty = rules.inside(folder, prefix), True
        for entry in _entries(folder):
            path, name = Path(entry.path), prefix + entry.name
            if self._stays(name, entry, rules):
                continue
            if refusal := archive_checks.name_error(name):
                raise SpecError("working_dir", f"{str(path)!r} is {refusal}", "rename it")
            if what := _special(path):  # that `!` in the user's file takes back
                raise SpecError("working_dir", f"{path} is a {what}, which has no content to send", leave_out(name))
            empty = False
            if entry.is_symlink():
                _refuse_link_outside(path, name, self.root)
                met.append(_Link(name, path, rules, above))
            elif entry.is_dir():
                yield from self._files(path, rules, met, f"{name}/", above)
            else:
                yield Entry(name, path)
        if empty and prefix:
            yield Entry(prefix, folder)

    def _stays(self, name: str, entry: "os.DirEntry[str]", rules: ignore_file.Ignored) -> bool:
        is_folder, path = _is_folder(entry), Path(entry.path)
        shown = f"{name}/" if is_folder else name
        if (rule := rules.own.match(name, is_folder)) and not (rule.takes_back and entry.name == GIT):
            return not rule.takes_back
        why = rules.why(name, is_folder, entry.is_symlink())
        if _is_generated(entry, is_folder):
            self.generated.append(shown)
        elif why is ignore_file.Why.CREDENTIALS:
            self.credentials.append(shown)
        elif why is ignore_file.Why.GIT:
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
