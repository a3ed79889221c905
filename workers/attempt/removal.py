"""Removes folders that user code filled: however deep or large they are, nobody waits for it."""

import subprocess
import threading
import uuid
from contextlib import suppress
from pathlib import Path

ASIDE = ".removed-"


def remove(folder: Path) -> None:
    """`folder` is gone when this returns; what was in it goes in the background. An absent one is none to remove."""
    aside = folder.with_name(f"{ASIDE}{uuid.uuid4().hex}")
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
    """`shutil.rmtree` recurses, so a thousand nested folders would stop it."""
    subprocess.run(["rm", "-rf", "--", path], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
