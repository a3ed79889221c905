"""Pack a working folder into a reproducible zip archive, named by its SHA-256: equal files and times give equal bytes.

Files that `.polyfleetignore` names are left out. Also left out, but reported to the user, are version control, caches,
environments, compiled files, files that .gitignore names, files that look like credentials, and files without content.
Links inside the folder are stored as links or, where that is not safe, as copies; links out of it are refused.
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
from operator import attrgetter
from pathlib import Path

from cluster.errors import SpecError, UserError
from cluster.input import archive_checks, archive_entries
from orchestrator.code_archives import ignore_file
from orchestrator.code_archives.excluded_files import ExcludedFiles, data_remedy, exclude_remedy
from orchestrator.code_archives.submitted_folder import SubmittedEntry, Walk

SCRATCH_PREFIX = "polyfleet-sending-"
OUR_PACKAGES = ("workers", "cluster", "orchestrator")
OUR_TASKS = frozenset({"prepare", "train", "benchmark"})
MODULE_SUFFIXES = (".py", ".so", ".pyd")
LIMIT_BYTES = 512 * 1024 * 1024
LIMIT_FILES = 20_000
LIMIT_FOLDERS = archive_checks.MAX_ENTRIES - LIMIT_FILES
EPOCH = (1980, 1, 1, 0, 0, 0)
PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class CodeArchive:
    """`sha` is the archive's SHA-256, hexadecimal. `content_sha` covers its entries without their times. `bytes` is the
    size of the files before compression.
    """

    sha: str
    content_sha: str
    path: Path
    files: int
    bytes: int
    left_out: ExcludedFiles


@contextmanager
def scratch() -> Iterator[Path]:
    """Private temporary folder for an archive that is being sent. Also removes those of processes that were killed."""
    for leftover in Path(tempfile.gettempdir()).glob(f"{SCRATCH_PREFIX}*"):
        pid = leftover.name.removeprefix(SCRATCH_PREFIX).partition("-")[0]
        with suppress(OSError):
            if leftover.stat().st_uid == os.geteuid() and pid.isdigit() and not _is_running(int(pid)):
                shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{SCRATCH_PREFIX}{os.getpid()}-") as folder:
        yield Path(folder)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pack(folder: Path, task: str, archive: Path) -> CodeArchive:
    """Write `folder` to the file `archive`. If it raises SpecError or UserError, no file remains."""
    _check_folder(folder)
    rules = ignore_file.load_rules(folder)
    walk = Walk(folder.resolve(), copied=OUR_PACKAGES)  # their files are needed to check whether they hide our packages
    entries = sorted(_check_limits(folder, walk.entries(folder, rules)), key=attrgetter("name"))
    check_module_names((entry.name for entry in entries), task)
    try:
        size, content_sha = _write(entries, archive)
    except OSError as e:
        archive.unlink(missing_ok=True)
        raise UserError(
            f"{e.filename or folder} cannot be packed: {e.strerror or e}", "make it readable, or move it away"
        ) from e
    try:
        archive_checks.check(archive)  # refuse an archive here that every node would refuse
    except UserError:
        archive.unlink(missing_ok=True)
        raise
    with archive.open("rb") as f:
        sha = hashlib.file_digest(f, "sha256").hexdigest()
    count = sum(entry.has_content for entry in entries)
    return CodeArchive(sha, content_sha, archive, count, size, walk.left_out())


def _check_folder(folder: Path) -> None:
    try:
        mode = folder.stat().st_mode
    except OSError as e:
        problem = "does not exist" if isinstance(e, FileNotFoundError) else f"cannot be read: {e.strerror}"
    else:
        problem = "" if stat.S_ISDIR(mode) else "is not a folder"
    if problem:
        raise SpecError(
            "working_dir", f"{folder} {problem}", "name a folder; a path in a file is relative to that file"
        )


def check_module_names(names: Iterable[str], task: str) -> None:
    """Raise SpecError if a file name in a code archive would hide one of our packages from the code that imports it.

    This applies only to tasks that load our library beside the user's code; a `run` command has its own folder first on
    its path.
    """
    if task not in OUR_TASKS:
        return
    for name in names:
        top, slash, rest = name.partition("/")
        module = top if slash else top.partition(".")[0]
        if module in OUR_PACKAGES and (rest or top).endswith(MODULE_SUFFIXES):
            raise SpecError(
                "working_dir",
                f"its top-level {top + slash!r} would hide Polyfleet's own package {module!r}",
                f"rename it, e.g. to {f'my_{module}{top[len(module) :]}'!r}, or put it inside a package of yours",
            )


def _check_limits(folder: Path, entries: Iterator[SubmittedEntry]) -> Iterator[SubmittedEntry]:
    """Yield `entries`. At a limit, before it walks an entire disk, raises SpecError that names the largest folders."""
    total = count = folders = 0
    by_top: dict[str, int] = {}
    for entry in entries:
        size = entry.path.stat().st_size if entry.has_content else 0
        total, count, folders = total + size, count + (not entry.is_folder), folders + entry.is_folder
        top = entry.name.partition("/")[0]
        by_top[top] = by_top.get(top, 0) + size
        if total > LIMIT_BYTES or count > LIMIT_FILES or folders > LIMIT_FOLDERS:
            tops = sorted(by_top, key=by_top.__getitem__)[:-4:-1]
            largest = ", ".join(f"{t} ({by_top[t] / 2**20:.0f} MiB)" for t in tops)
            raise SpecError(
                "working_dir",
                f"{folder} has over {LIMIT_BYTES >> 20} MiB, {LIMIT_FILES:,} files or {LIMIT_FOLDERS:,} folders;"
                f" the largest so far: {largest}",
                f"{exclude_remedy(tops[0])}; {data_remedy(folder / tops[0], tops[0])}",
            )
        yield entry


def _mode(entry: SubmittedEntry) -> int:
    """File type and permissions. Group and others get the owner's permissions without writing, or none, so that the
    archive does not depend on this user's umask. The owner of a folder has all, so that jobs can write to it.
    """
    if entry.link:
        return stat.S_IFLNK | 0o777
    mode = entry.path.stat().st_mode
    owner = 0o7 if entry.is_folder else (mode & stat.S_IRWXU) >> 6
    file_type = stat.S_IFDIR if entry.is_folder else stat.S_IFREG
    return file_type | owner << 6 | ((owner & 0o5) * 0o11 if mode & stat.S_IRWXO else 0)


def _write(entries: list[SubmittedEntry], archive: Path) -> tuple[int, str]:
    """Write the archive. Returns the bytes of all files, and `content_sha`."""
    total, facts = 0, []
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as zipped:
        for entry in entries:
            info = zipfile.ZipInfo(entry.name, EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.create_system = 3
            info.external_attr = _mode(entry) << 16
            if not entry.link and entry.keeps_time:
                info.extra = archive_entries.time_field(int(entry.path.stat().st_mtime))
            size, content = _write_file(zipped, info, entry.path) if entry.has_content else (0, entry.link)
            if not entry.has_content:
                zipped.writestr(info, entry.link)
            facts.append((info.filename, archive_entries.permission_bits(info), content))
            total += size
    return total, archive_entries.content_sha(facts)


def _write_file(zipped: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> tuple[int, str]:
    """Write one file into the archive. Returns the bytes of its content, and their SHA-256."""
    size, digest = 0, hashlib.sha256()
    with path.open("rb") as source, zipped.open(info, "w") as target:
        while piece := source.read(PIECE_BYTES):
            target.write(piece)
            digest.update(piece)
            size += len(piece)
    return size, digest.hexdigest()
