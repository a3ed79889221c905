"""Submitted archives are read in a process of its own, with limits and without network: neither the server nor an agent
opens one itself. `python -m cluster.archive_unpack ARCHIVE [FOLDER]` is that process; it answers with one line of JSON.
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
from cluster import archive_checks, sandbox
from cluster.archive_entries import Fact, content_sha, modified_s, rights
from cluster.archive_links import Tree
from cluster.errors import FleetError, UserError
from cluster.safe_path_walk import FOLDER, descend

CODE = Path(cluster.__file__).absolute().parents[1]
LARGEST_ANSWER_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Contents:
    """Of an archive: the names of all entries, with a slash behind folders and links to folders, and `content_sha`."""

    names: list[str]
    content_sha: str


Read = Callable[[Path, "Path | None"], Contents]


def read(archive: Path, folder: "Path | None" = None) -> Contents:
    """Check an archive and unpack each entry into `folder`, which must be empty, or to nowhere. Runs in this process.
    Raises UserError.
    """
    entries = archive_checks.check(archive)
    content_bytes = sum(info.file_size for info in entries)
    sandbox.raise_limits(data_bytes=content_bytes, file_bytes=max(content_bytes, 1) if folder else 0)
    links: dict[str, str] = {}
    facts: list[Fact] = []

    def take(info: zipfile.ZipInfo, content: IO[bytes]) -> None:
        if archive_checks.is_link(info):
            held = links[info.filename] = archive_checks.link_text(content)
        else:
            held = _write(info, content, folder) if folder else _copy(content, None)
        facts.append((info.filename, rights(info), held))

    archive_checks.iterate_files(archive, take)
    if folder:
        _make_links(links, folder)  # last: nothing is written through one
    names = [info.filename for info in entries]
    tree = Tree(names, links)
    named = [f"{name}/" if name in links and tree.leads_to_folder(name) else name for name in names]
    return Contents(named, content_sha(facts))


def read_in_child(archive: Path, folder: "Path | None" = None) -> Contents:
    """`read` in a process of its own, which ends with this thread. Raises UserError; FleetError where it could not be
    done here: the disk is full, or the process was killed.
    """
    words = [str(archive), *([str(folder)] if folder else [])]
    done = subprocess.run(
        [sys.executable, "-S", "-s", "-P", "-m", "cluster.archive_unpack", *words],
        env={"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": str(CODE), "LC_ALL": "C.UTF-8"},
        stdin=subprocess.DEVNULL, capture_output=True, check=False,
    )  # fmt: skip
    try:
        told: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        reached = sandbox.limit_message(done.returncode)
        if reached:
            raise archive_checks.BrokenArchive(reached) from None
        said = (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise FleetError(f"the submitted archive could not be read here: {said}", "submit the job again") from None
    if "refused" in told:
        raise UserError(*told["refused"])
    if "failed" in told:
        raise FleetError(f"the submitted archive could not be unpacked: {told['failed']}", "free space there")
    return Contents(**told["contents"])


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
        os.fchmod(descriptor, rights(info))  # whatever the umask here is
    if (at_s := modified_s(info)) is not None:
        with suppress(OSError):  # a file system may not support such a time
            os.utime(path, (at_s, at_s), follow_symlinks=False)
    return digest


def _make_links(links: dict[str, str], folder: Path) -> None:
    """Each is made in a folder that was reached without following a link. Raises UserError where one leads out of
    `folder` on this disk, whatever the names in the archive say.
    """
    for name, text in links.items():
        *above, last = name.split("/")
        parent = descend(os.open(folder, FOLDER), above, make=True)
        try:
            os.symlink(text, last, dir_fd=parent)
        finally:
            os.close(parent)
    inside = folder.resolve()
    for name in links:
        if not (folder / name).resolve(strict=True).is_relative_to(inside):
            raise UserError(
                f"the submitted archive holds {name[:200]!r}, a link out of its folder", archive_checks.AGAIN
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
    # Half, since an entry of the directory is read into less than twenty times its size.
    sandbox.raise_limits(metadata_bytes=min(archive.stat().st_size, archive_checks.LARGEST_DIRECTORY_BYTES) // 2)
    told: dict[str, Any]
    try:
        told = {"contents": asdict(read(archive, folder))}
    except UserError as e:
        told = {"refused": [e.message, e.remedy]}
    except MemoryError:
        told = {
            "refused": ["the submitted archive needs more memory than archives of its size do", archive_checks.AGAIN]
        }
    except OSError as e:
        told = {"failed": e.strerror or str(e)}
    sys.stdout.write(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
