"""A working folder as one zip archive: the same folder gives the same bytes, so that its SHA-256 names it.

Left out: version control, caches, environments, compiled files, what `.polyfleetignore` names, and, told to the user,
what looks like credentials. Links are followed inside the folder, refused outside.
"""

import hashlib
import os
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cluster import archives
from cluster.errors import SpecError, UserError
from orchestrator import ignoring

SCRATCH = "polyfleet-sending-"
SKIPPED_FOLDERS = frozenset({".git", "__pycache__", ".venv", "node_modules"})
SKIPPED_SUFFIXES = (".pyc",)
OUR_NAMES = ("workers", "cluster", "orchestrator")
OUR_TASKS = frozenset({"prepare", "train", "benchmark"})
MODULE_SUFFIXES = (".py", ".so", ".pyd")
LIMIT_BYTES = 512 * 1024 * 1024
LIMIT_FILES = 20_000
MOST_NAMED = 5
EPOCH = (1980, 1, 1, 0, 0, 0)
PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Package:
    """`sha` is the archive's SHA-256, hexadecimal; `bytes` counts the files before compression. `credentials` are files
    and folders that stayed behind because of their names.
    """

    sha: str
    path: Path
    files: int
    bytes: int
    credentials: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        """What the user has to know about the folder; "" when all of it travels."""
        if not self.credentials:
            return ""
        named = ", ".join(self.credentials[:MOST_NAMED])
        more = f" and {len(self.credentials) - MOST_NAMED} more" if len(self.credentials) > MOST_NAMED else ""
        return (
            f"left out of the submitted folder, because they may hold credentials: {named}{more}."
            f" To send one all the same, write !{self.credentials[0]} into {ignoring.FILE}"
        )


@contextmanager
def scratch() -> Iterator[Path]:
    """A private folder for an archive on its way. Those of processes that were killed go with the next one."""
    for left in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
        pid = left.name.removeprefix(SCRATCH).partition("-")[0]
        with suppress(OSError):
            if left.stat().st_uid == os.geteuid() and pid.isdigit() and not _lives(int(pid)):
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{SCRATCH}{os.getpid()}-") as folder:
        yield Path(folder)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pack(folder: Path, task: str, archive: Path) -> Package:
    """Write `folder` to the file `archive`. Raises SpecError or UserError, with nothing left behind."""
    _refuse_unless_folder(folder)
    walk = _Walk(folder.resolve(), ignoring.rules_of(folder), [])
    files = sorted(_within_limits(folder, walk.files(folder)))
    refuse_our_names((name for name, _ in files), task)
    try:
        size = _write(files, archive)
    except OSError as e:
        archive.unlink(missing_ok=True)
        raise UserError(
            f"{e.filename or folder} cannot be packed: {e.strerror or e}", "make it readable, or move it away"
        ) from e
    try:
        archives.check(archive)  # what no node would take is told before it is sent
    except UserError:
        archive.unlink(missing_ok=True)
        raise
    with archive.open("rb") as f:
        sha = hashlib.file_digest(f, "sha256").hexdigest()
    return Package(sha, archive, len(files), size, tuple(sorted(walk.credentials)))


def _refuse_unless_folder(folder: Path) -> None:
    try:
        mode = folder.stat().st_mode
    except OSError as e:
        what = "does not exist" if isinstance(e, FileNotFoundError) else f"cannot be read: {e.strerror}"
    else:
        what = "" if stat.S_ISDIR(mode) else "is not a folder"
    if what:
        raise SpecError("working_dir", f"{folder} {what}", "name a folder; a path in a file is relative to that file")


def refuse_our_names(names: Iterable[str], task: str) -> None:
    """Raises SpecError when one of a package's file names would hide a package of ours from the code that needs it.

    Only for tasks that load our library beside the user's code; a `run` command has its own folder first on its path.
    """
    if task not in OUR_TASKS:
        return
    for name in names:
        top, slash, rest = name.partition("/")
        module = top if slash else top.partition(".")[0]
        if module in OUR_NAMES and (rest or top).endswith(MODULE_SUFFIXES):
            raise SpecError(
                "working_dir",
                f"its top-level {top + slash!r} would hide Polyfleet's own package {module!r}",
                f"rename it, e.g. to {f'my_{module}{top[len(module) :]}'!r}, or put it inside a package of yours",
            )


@dataclass(frozen=True, slots=True)
class _Walk:
    """`root` is the submitted folder, without links; `credentials` collects what stays behind because of its name."""

    root: Path
    rules: ignoring.Rules
    credentials: list[str]

    def files(self, folder: Path, prefix: str = "", above: tuple[Path, ...] = ()) -> Iterator[tuple[str, Path]]:
        """(name in the archive, file) below `folder`. `above`: the real folders on the way, to notice circles."""
        here = folder.resolve()
        if len(above) > archives.MOST_FOLDERS:
            raise SpecError(
                "working_dir",
                f"{prefix[:60]}… lies in more than {archives.MOST_FOLDERS} folders, one in another",
                f"move it away, or name a folder above it in {ignoring.FILE}",
            )
        for entry in _entries(folder):
            path, name = Path(entry.path), prefix + entry.name
            if self._left_out(name, entry):
                continue
            if refusal := archives.name_refusal(name):
                raise SpecError("working_dir", f"{str(path)!r} is {refusal}", "rename it")
            if entry.is_symlink():
                _refuse_link_outside(path, self.root)
            if entry.is_dir():
                if path.resolve() in (*above, here):
                    raise SpecError("working_dir", f"{path} is a link to a folder it is in", "remove the link")
                yield from self.files(path, f"{name}/", (*above, here))
            elif not stat.S_ISREG(path.stat().st_mode):
                raise SpecError("working_dir", f"{path} is neither a file nor a folder", "move it away")
            else:
                yield name, path

    def _left_out(self, name: str, entry: "os.DirEntry[str]") -> bool:
        is_folder = _is_folder(entry)
        if (entry.name in SKIPPED_FOLDERS) if is_folder else entry.name.endswith(SKIPPED_SUFFIXES):
            return True
        rule = self.rules.match(name, is_folder)
        if rule and rule.ours:
            self.credentials.append(f"{name}/" if is_folder else name)
        return rule is not None


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


def _within_limits(folder: Path, files: Iterator[tuple[str, Path]]) -> Iterator[tuple[str, Path]]:
    """`files` itself. Stops at the limits, before a whole disk was walked, and names what is large."""
    total = count = 0
    by_top: dict[str, int] = {}
    for name, path in files:
        size = path.stat().st_size
        total, count = total + size, count + 1
        top = name.partition("/")[0]
        by_top[top] = by_top.get(top, 0) + size
        if total > LIMIT_BYTES or count > LIMIT_FILES:
            largest = ", ".join(
                f"{t} ({by_top[t] / 2**20:.0f} MiB)" for t in sorted(by_top, key=by_top.__getitem__)[:-4:-1]
            )
            raise SpecError(
                "working_dir",
                f"{folder} has over {LIMIT_BYTES >> 20} MiB or {LIMIT_FILES:,} files; the largest so far: {largest}",
                "keep code in it and data elsewhere: jobs reach data by path or by name",
            )
        yield name, path


def _write(files: list[tuple[str, Path]], archive: Path) -> int:
    total = 0
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as zipped:
        for name, path in files:
            info = zipfile.ZipInfo(name, EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.create_system = 3
            executable = path.stat().st_mode & stat.S_IXUSR
            info.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
            with path.open("rb") as source, zipped.open(info, "w") as target:
                while piece := source.read(PIECE_BYTES):
                    target.write(piece)
                    total += len(piece)
    return total
