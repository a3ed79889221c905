"""Remove folders that user code filled, in the background, however deep, large or unreadable they are."""

import logging
import subprocess
import threading
import uuid
from contextlib import suppress
from pathlib import Path

REMOVED_PREFIX = ".removed-"
LOG = logging.getLogger(__name__)


def remove(folder: Path, trash: Path | None = None) -> None:
    """Rename `folder` at once and delete it in the background. Does nothing if it does not exist.

    It is moved into `trash`, a folder on the same file system (default: its parent).
    """
    renamed = (trash or folder.parent) / f"{REMOVED_PREFIX}{uuid.uuid4().hex}"
    with suppress(FileNotFoundError):
        folder.rename(renamed)
        _start_deletion(renamed)


def resume(parent: Path) -> None:
    """Continue the removals in `parent` that an earlier agent started."""
    for path in parent.glob(f"{REMOVED_PREFIX}*"):
        _start_deletion(path)


def _start_deletion(path: Path) -> None:
    threading.Thread(target=_delete, args=(path,), name="removal", daemon=True).start()


def _delete(path: Path) -> None:
    """Delete with `rm`: `shutil.rmtree` recurses, so a thousand nested folders would stop it.

    Folders that their owner may not write, such as those of Go's module cache, are made writable if need be. The next
    agent tries again to delete what is left.
    """
    if _run("rm", "-rf", "--", path):
        return
    if not path.is_symlink():  # `chmod -R` follows no links below it
        _run("chmod", "-R", "u+rwX", "--", path)
    if not _run("rm", "-rf", "--", path):
        LOG.error("%s was removed, but this user may not delete some of its files: delete it by hand", path)


def _run(*command: str | Path) -> bool:
    """Run a command and return whether it succeeded. Its output, perhaps a line for each file, is dropped."""
    null = subprocess.DEVNULL
    return subprocess.run(command, stdin=null, stdout=null, stderr=null, check=False).returncode == 0
