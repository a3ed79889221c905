"""Removes folders that user code filled: however deep, large or closed they are, nobody waits for it."""

import logging
import subprocess
import threading
import uuid
from contextlib import suppress
from pathlib import Path

ASIDE = ".removed-"
LOG = logging.getLogger(__name__)


def remove(folder: Path, waste: Path | None = None) -> None:
    """`folder` is gone when this returns; what was in it goes in the background, from the folder `waste` on the same
    file system, else from beside it. An absent one is none to remove.
    """
    aside = (waste or folder.parent) / f"{ASIDE}{uuid.uuid4().hex}"
    with suppress(FileNotFoundError):
        folder.rename(aside)
        _begin(aside)


def resume(parent: Path) -> None:
    """Go on with what an agent before us began to remove below `parent`."""
    for path in parent.glob(f"{ASIDE}*"):
        _begin(path)


def _begin(path: Path) -> None:
    threading.Thread(target=_delete, args=(path,), name="removal", daemon=True).start()


def _delete(path: Path) -> None:
    """`shutil.rmtree` recurses, so a thousand nested folders would stop it. Folders that their owner may not write, as
    those of Go's module cache, are made writable first. What is left then is tried again by the next agent.
    """
    if _run("rm", "-rf", "--", path):
        return
    if not path.is_symlink():  # and below it chmod follows none
        _run("chmod", "-R", "u+rwX", "--", path)
    if not _run("rm", "-rf", "--", path):
        LOG.error("%s was removed, and something in it cannot be deleted by this user: delete it by hand", path)


def _run(*command: str | Path) -> bool:
    """Whether it did all of it. It may complain of millions of files, which nobody reads."""
    null = subprocess.DEVNULL
    return subprocess.run(command, stdin=null, stdout=null, stderr=null, check=False).returncode == 0
