"""Read submitted archives in a child process with limits and without network.

Neither the server nor an agent opens an archive itself. `python -m cluster.input.archive_unpack ARCHIVE [FOLDER]` is
the child; it replies with one line of JSON.
"""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import cluster
from cluster.errors import FleetError, UserError
from cluster.input import archive_checks, sandbox
from cluster.input.archive_entries import Fact, content_sha, modification_time_s, permission_bits, without_parents
from cluster.input.archive_links import ArchiveTree
from cluster.input.folder_entries import FOLDER, descend

CODE = Path(cluster.__file__).absolute().parents[1]
MAX_REPLY_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class ArchiveContents:
    """Content of an archive. In `names`, empty folders and links to folders end with a slash; others are implied."""

    names: list[str]
    content_sha: str


Read = Callable[[Path, "Path | None"], ArchiveContents]


def read(archive: Path, folder: "Path | None" = None) -> ArchiveContents:
    """Check an archive in this process, and unpack it into `folder`, unless that is None.

    `folder` must be empty. Raises UserError.
    """
    entries = archive_checks.check(archive)
    content_bytes = sum(info.file_size for info in entries)
    sandbox.raise_limits(data_bytes=content_bytes, file_bytes=max(content_bytes, 1) if folder else 0)
    links: dict[str, str] = {}
    facts: list[Fact] = []

    def take(info: zipfile.ZipInfo, content: IO[bytes]) -> None:
        if archive_checks.is_link(info):
            fact = links[info.filename] = archive_checks.read_link_target(content)
        else:
            fact = _write(info, content, folder) if folder else _copy(content, None)
        facts.append((info.filename, permission_bits(info), fact))

    archive_checks.iterate_files(archive, take)
    if folder:
        _make_links(links, folder)  # after all files, so that nothing is written through a link
        _restore_folders(entries, folder)
    names = [info.filename for info in entries]
    tree = ArchiveTree(names, links)
    marked_names = [
        f"{name}/" if name in links and tree.leads_to_folder(name) else name for name in without_parents(names)
    ]
    return ArchiveContents(marked_names, content_sha(facts))


def read_in_child(archive: Path, folder: "Path | None" = None) -> ArchiveContents:
    """Run `read` in a child process, which ends with this thread.

    Raises UserError, or FleetError if this machine is the cause: the disk is full, or the child was killed.
    """
    arguments = [str(archive), *([str(folder)] if folder else [])]
    child = subprocess.run(
        [sys.executable, "-S", "-s", "-P", "-m", "cluster.input.archive_unpack", *arguments],
        env={"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": str(CODE), "LC_ALL": "C.UTF-8"},
        stdin=subprocess.DEVNULL, capture_output=True, check=False,
    )  # fmt: skip
    try:
        reply: dict[str, Any] = json.loads(child.stdout)
    except ValueError:
        limit = sandbox.limit_message(child.returncode)
        if limit:
            raise archive_checks.BrokenArchive(limit) from None
        reason = (child.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        raise FleetError(f"the submitted archive could not be read: {reason}", "submit the job again") from None
    if "refused" in reply:
        raise UserError(*reply["refused"])
    if "failed" in reply:
        raise FleetError(
            f"the submitted archive could not be unpacked: {reply['failed']}",
            "free disk space there, then submit again",
        )
    return ArchiveContents(**reply["contents"])


def _write(info: zipfile.ZipInfo, content: IO[bytes], folder: Path) -> str:
    """Unpack one file or folder. Returns the SHA-256 of its content, "" for a folder."""
    path = folder / PurePosixPath(info.filename)
    if info.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        return ""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as to:
        digest = _copy(content, to)
        to.flush()  # a later write would change the time
        os.fchmod(descriptor, permission_bits(info))  # independent of this process's umask
        _restore_time(info, descriptor)
    return digest


def _restore_folders(entries: list[zipfile.ZipInfo], folder: Path) -> None:
    """Give folders their permissions and times: last, because a new entry changes the time of its folder."""
    for info in entries:
        if info.is_dir():
            descriptor = descend(os.open(folder, FOLDER), info.filename.removesuffix("/").split("/"))
            try:
                os.fchmod(descriptor, permission_bits(info))
                _restore_time(info, descriptor)
            finally:
                os.close(descriptor)


def _restore_time(info: zipfile.ZipInfo, descriptor: int) -> None:
    if (at_s := modification_time_s(info)) is not None:
        with suppress(OSError):  # a file system may not support such a time
            os.utime(descriptor, (at_s, at_s))


def _make_links(links: dict[str, str], folder: Path) -> None:
    """Create the links, each in a folder that is reached without following a link.

    Raises UserError if a link points outside `folder` on this disk, whatever the names in the archive imply.
    """
    for name, text in links.items():
        *parents, last = name.split("/")
        parent = descend(os.open(folder, FOLDER), parents, create=True)
        try:
            os.symlink(text, last, dir_fd=parent)
        finally:
            os.close(parent)
    root = folder.resolve()
    for name in links:
        if not (folder / name).resolve(strict=True).is_relative_to(root):
            raise UserError(
                f"the submitted archive contains {name[:200]!r}, a link out of its folder", archive_checks.SUBMIT_AGAIN
            )


def _copy(content: IO[bytes], to: "IO[bytes] | None") -> str:
    """Read all of `content`, write it to `to` unless that is None, and return its SHA-256."""
    digest = hashlib.sha256()
    while piece := content.read(archive_checks.COPY_BYTES):
        digest.update(piece)
        if to:
            to.write(piece)
    return digest.hexdigest()


def main() -> int:
    archive, folder = Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None
    sandbox.isolate()
    sandbox.apply_limits()
    # Half, because the memory for an entry of the directory is less than twenty times the entry's size.
    sandbox.raise_limits(metadata_bytes=min(archive.stat().st_size, archive_checks.MAX_DIRECTORY_BYTES) // 2)
    reply: dict[str, Any]
    try:
        reply = {"contents": asdict(read(archive, folder))}
    except UserError as e:
        reply = {"refused": [e.message, e.remedy]}
    except MemoryError:
        reply = {
            "refused": [
                "the submitted archive needs more memory than archives of its size do",
                archive_checks.SUBMIT_AGAIN,
            ]
        }
    except OSError as e:
        reply = {"failed": e.strerror or str(e)}
    sys.stdout.write(json.dumps(reply))
    return 0


if __name__ == "__main__":
    sys.exit(main())
