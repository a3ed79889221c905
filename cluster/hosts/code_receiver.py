"""Unpack our code on a host that has none of it yet.

It runs as `ssh HOST python3.11 -I -c ... FOLDER < code.tar`. The folder is created atomically. The archive comes from
us, over ssh; anything but plain files inside the folder is refused nevertheless. Uses only the standard library of
Python 3.11.0, whose `tarfile` has no filters.
"""

import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import IO


def main(target: Path) -> None:
    os.umask(0o077)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=target.parent, ignore_cleanup_errors=True) as part:
        staging = Path(part) / "code"
        with tarfile.open(fileobj=sys.stdin.buffer, mode="r|gz") as archive:
            for member in archive:
                write_file(archive.extractfile(member) if member.isfile() else None, staging, Path(member.name))
        if target.exists():
            target.rename(Path(part) / "replaced")
        try:
            staging.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another `polyfleet up` was first
                raise
    shutil.rmtree(part, ignore_errors=True)


def write_file(content: IO[bytes] | None, folder: Path, name: Path) -> None:
    if content is None or name.is_absolute() or ".." in name.parts:
        raise SystemExit(f"{name} is not a file of our code")
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    with content, (folder / name).open("xb") as file:
        shutil.copyfileobj(content, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
