"""Walk a submitted folder: decide which files, folders and links are sent, and collect what is left out."""

import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from cluster.errors import SpecError, UserError
from cluster.input import archive_checks
from cluster.input.archive_links import ArchiveTree
from orchestrator.code_archives import ignore_file
from orchestrator.code_archives.excluded_files import GIT, MAX_COUNT, ExcludedFiles, data_remedy, exclude_remedy

PYCACHE = "__pycache__"
GENERATED_FOLDERS = frozenset({
    PYCACHE, ".venv", "node_modules", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", ".tox",
    ".nox", ".eggs", ".ipynb_checkpoints",
})  # fmt: skip
GENERATED_SUFFIXES = (".pyc", ".swp")
GENERATED_FILES = frozenset({".DS_Store"})
ENVIRONMENT_MARKERS = ("pyvenv.cfg", "conda-meta")
"""Contents by which a virtual environment (PEP 405) or conda environment is recognized, whatever its name."""
CORE_DUMP = re.compile(r"(vg)?core(\.[\w-]+)?|.*\.core")
ELF_CORE = 4
"""The type of a core dump. Source: elf(5), ET_CORE; 16-bit field at byte 16."""
SPECIAL = {stat.S_IFSOCK: "socket", stat.S_IFIFO: "pipe", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}


@dataclass(frozen=True, slots=True)
class SubmittedEntry:
    """One entry of the archive. `name` ends in a slash for a folder; `link` is the target of a link, "" for anything
    else. `keeps_time`: the modification time is sent. That of a folder also changes with entries that are left out.
    """

    name: str
    path: Path
    link: str = ""
    keeps_time: bool = True

    @property
    def is_folder(self) -> bool:
        return self.name.endswith("/")

    @property
    def has_content(self) -> bool:
        return not (self.link or self.is_folder)


@dataclass(frozen=True, slots=True)
class _Link:
    """A link in the folder. `rules` apply in its folder; `above` are the real folders that contain it."""

    name: str
    path: Path
    rules: ignore_file.IgnoreRules
    above: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Walk:
    """One walk through a submitted folder. `root`: its real path. `copied`: names of links that are sent as copies of
    their targets. The other fields collect what is left out, by reason.
    """

    root: Path
    copied: tuple[str, ...] = ()
    credentials: list[str] = field(default_factory=list)
    by_git: list[tuple[str, Path]] = field(default_factory=list)
    generated: list[str] = field(default_factory=list)
    special: list[tuple[str, str]] = field(default_factory=list)

    def left_out(self) -> ExcludedFiles:
        files = 0
        for name, path in self.by_git:
            files += _count_files(path, MAX_COUNT - files) if name.endswith("/") else 1
        names = sorted(name for name, _ in self.by_git)
        generated, special = tuple(sorted(self.generated)), tuple(sorted(self.special))
        return ExcludedFiles(tuple(sorted(self.credentials)), tuple(names), min(files, MAX_COUNT), generated, special)

    def entries(self, folder: Path, rules: ignore_file.IgnoreRules) -> Iterator[SubmittedEntry]:
        """Yield everything of `folder` that is sent. A link is sent as a link if the names that are sent show it to be
        safe. It is sent as a copy if it is absolute, or leads through another link or to something left out.
        """
        names: list[str] = []
        links: dict[str, str] = {}
        pending_links: list[_Link] = []
        walks: list[Iterator[SubmittedEntry]] = [self._files(folder, rules, pending_links)]
        while walks:
            for entry in chain.from_iterable(walks):
                names.append(entry.name)
                yield entry
            targets = {link.name: str(link.path.readlink()) for link in pending_links if link.name not in self.copied}
            tree, walks, followed = ArchiveTree(names, links | targets), [], pending_links.copy()
            pending_links.clear()  # the walks of the next round fill it
            for link in followed:
                if link.name in targets and not tree.link_error(link.name):
                    links[link.name] = targets[link.name]
                    yield SubmittedEntry(link.name, link.path, targets[link.name])
                else:
                    walks.append(self._follow_link(link, pending_links))

    def _follow_link(self, link: _Link, pending_links: list[_Link]) -> Iterator[SubmittedEntry]:
        """Yield the target of a link that is sent as a copy."""
        if not link.path.is_dir():
            yield SubmittedEntry(link.name, link.path)
            return
        if link.path.resolve() in link.above:
            raise SpecError("working_dir", f"{link.path} is a link to a folder it is in", exclude_remedy(link.name))
        yield from self._files(link.path, link.rules, pending_links, f"{link.name}/", link.above)

    def _files(
        self,
        folder: Path,
        rules: ignore_file.IgnoreRules,
        pending_links: list[_Link],
        prefix: str = "",
        above: tuple[Path, ...] = (),
    ) -> Iterator[SubmittedEntry]:
        """Yield files below `folder`, and then the folder itself, unless it is the root. `rules` are those of its
        parent. Links are appended to `pending_links`. `above`: the real folders from the root down, to detect cycles.
        """
        above = (*above, folder.resolve())
        if len(above) - 1 > archive_checks.MAX_FOLDER_DEPTH:
            raise SpecError(
                "working_dir",
                f"{prefix[:60]}… is nested in more than {archive_checks.MAX_FOLDER_DEPTH} folders",
                f"move it away, or write a folder above it into {ignore_file.FILE}",
            )
        rules, is_complete = rules.inside(folder, prefix), True
        for entry in _entries(folder):
            path, name = Path(entry.path), prefix + entry.name
            if self._is_left_out(name, entry, rules):
                is_complete = False
                continue
            if refusal := archive_checks.name_error(name):
                raise SpecError("working_dir", f"{str(path)!r} is {refusal}", "rename it")
            if type_name := _special_type(path):  # reached only if `!` in the user's file includes it
                raise SpecError(
                    "working_dir", f"{path} is a {type_name}, which has no content to send", exclude_remedy(name)
                )
            if entry.is_symlink():
                _check_link_inside(path, name, self.root)
                pending_links.append(_Link(name, path, rules, above))
            elif entry.is_dir():
                yield from self._files(path, rules, pending_links, f"{name}/", above)
            else:
                yield SubmittedEntry(name, path)
        if prefix:
            yield SubmittedEntry(prefix, folder, keeps_time=is_complete)

    def _is_left_out(self, name: str, entry: "os.DirEntry[str]", rules: ignore_file.IgnoreRules) -> bool:
        is_folder, path = _is_folder(entry), Path(entry.path)
        display_path = f"{name}/" if is_folder else name
        if (rule := rules.own.match(name, is_folder)) and not (rule.is_negated and entry.name == GIT):
            return not rule.is_negated
        reason = rules.exclusion_reason(name, is_folder, entry.is_symlink())
        if _is_generated(entry, is_folder):
            self.generated.append(display_path)
        elif reason is ignore_file.ExclusionReason.CREDENTIALS:
            self.credentials.append(display_path)
        elif reason is ignore_file.ExclusionReason.GIT:
            self.by_git.append((display_path, path))
        elif type_name := _special_type(path):
            self.special.append((name, type_name))
        else:
            return False
        return True


def _count_files(folder: Path, limit: int) -> int:
    """Count files below `folder`, without following links, up to about `limit`."""
    count = 0
    for _, _, names in os.walk(folder):
        count += len(names)
        if count >= limit:
            break
    return count


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a cycle of links
        return False


def _is_generated(entry: "os.DirEntry[str]", is_folder: bool) -> bool:
    """Return whether the entry belongs to version control, or is a cache, compiled file, environment, core dump, or
    file of an editor or the operating system.
    """
    if entry.name == GIT:
        return True
    # The walk enters this folder only if the user included it, which includes its content.
    if PYCACHE in Path(entry.path).parent.parts[-1:]:
        return False
    if is_folder:
        return entry.name in GENERATED_FOLDERS or any(Path(entry.path, mark).exists() for mark in ENVIRONMENT_MARKERS)
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


def _special_type(path: Path) -> str:
    """Type of a path that has no content to send, e.g. broken link or socket; "" for any other."""
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


def _check_link_inside(path: Path, name: str, root: Path) -> None:
    target = path.resolve(strict=True)
    if not target.is_relative_to(root):
        raise SpecError(
            "working_dir",
            f"{path} is a link to {target}, outside the folder",
            f"{exclude_remedy(name)}; {data_remedy(target, name)}",
        )
