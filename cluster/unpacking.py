"""Submitted archives are read in a process of its own, with limits and without network: neither the server nor an agent
opens one itself. `python -m cluster.unpacking ARCHIVE [FOLDER]` is that process; it answers with one line of JSON.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO, Any

import cluster
from cluster import archives, sandbox
from cluster.archive_links import Tree
from cluster.descents import FOLDER, descend
from cluster.errors import FleetError, UserError

Read = Callable[[Path, "Path | None"], list[str]]
CODE = Path(cluster.__file__).absolute().parents[1]
LARGEST_ANSWER_BYTES = 128 << 20


def read(archive: Path, folder: "Path | None" = None) -> list[str]:
    """The names of all entries, with a slash behind folders and links to them, each of which was unpacked: into
    `folder`, which is empty, or to nowhere. In this process. Raises UserError.
    """
    entries = archives.check(archive)
    content_bytes = sum(info.file_size for info in entries)
    sandbox.expect(data_bytes=content_bytes, file_bytes=max(content_bytes, 1) if folder else 0)
    links: dict[str, str] = {}

    def take(info: zipfile.ZipInfo, content: IO[bytes]) -> None:
        if archives.is_link(info):
            links[info.filename] = archives.link_text(content)
        elif folder:
            _write(info, content, folder)
        else:
            _exhaust(content)

    archives.read_each(archive, take)
    if folder:
        _make_links(links, folder)  # last: nothing is written through one
    names = [info.filename for info in entries]
    tree = Tree(names, links)
    return [f"{name}/" if name in links and tree.leads_to_folder(name) else name for name in names]


def read_apart(archive: Path, folder: "Path | None" = None) -> list[str]:
    """`read` in a process of its own, which ends with this thread. Raises UserError; FleetError where it could not be
    done here: the disk is full, or the process was killed.
    """
    words = [str(archive), *([str(folder)] if folder else [])]
    done = subprocess.run(
        [sys.executable, "-S", "-s", "-P", "-m", "cluster.unpacking", *words],
        env={"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": str(CODE), "LC_ALL": "C.UTF-8"},
        stdin=subprocess.DEVNULL, capture_output=True, check=False,
    )  # fmt: skip
    try:
        told: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        reached = sandbox.limit_reached(done.returncode)
        if reached:
            raise archives.BrokenArchive(reached) from None
        said = (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise FleetError(f"the submitted archive could not be read here: {said}", "submit the job again") from None
    if "refused" in told:
        raise UserError(*told["refused"])
    if "failed" in told:
        raise FleetError(f"the submitted archive could not be unpacked: {told['failed']}", "free space there")
    names: list[str] = told["names"]
    return names


def _write(info: zipfile.ZipInfo, content: IO[bytes], folder: Path) -> None:
    path = folder / PurePosixPath(info.filename)
    if info.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as to:
        shutil.copyfileobj(content, to, archives.COPY_BYTES)
        os.fchmod(descriptor, _mode(info))  # whatever the umask here is


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
            raise UserError(f"the submitted archive holds {name[:200]!r}, a link out of its folder", archives.AGAIN)


def _mode(info: zipfile.ZipInfo) -> int:
    """Its owner may read it always. No setuid, and nobody else may write."""
    return info.external_attr >> 16 & 0o755 | stat.S_IRUSR if info.external_attr >> 16 else 0o644


def _exhaust(content: IO[bytes]) -> None:
    while content.read(archives.COPY_BYTES):
        pass


def main() -> int:
    archive, folder = Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None
    sandbox.isolate()
    sandbox.bound()
    # Half, since an entry of the directory is read into less than twenty times its size.
    sandbox.expect(metadata_bytes=min(archive.stat().st_size, archives.LARGEST_DIRECTORY_BYTES) // 2)
    told: dict[str, Any]
    try:
        told = {"names": read(archive, folder)}
    except UserError as e:
        told = {"refused": [e.message, e.remedy]}
    except MemoryError:
        told = {"refused": ["the submitted archive needs more memory than archives of its size do", archives.AGAIN]}
    except OSError as e:
        told = {"failed": e.strerror or str(e)}
    sys.stdout.write(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
