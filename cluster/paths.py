"""Where Polyfleet keeps things on a machine. Nothing is created by asking."""

import os
import threading
from pathlib import Path


def home() -> Path:
    """State of this user's server and embedded fleet: POLYFLEET_HOME, else ~/.polyfleet. Holds tokens, so it is made
    0700.
    """
    return Path(os.environ.get("POLYFLEET_HOME") or Path.home() / ".polyfleet").expanduser().absolute()


def cache() -> Path:
    """What can be made again: environments and code folders. POLYFLEET_CACHE, else $XDG_CACHE_HOME/polyfleet, else
    ~/.cache/polyfleet.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("POLYFLEET_CACHE") or Path(base) / "polyfleet").expanduser().absolute()


def private_dir(path: Path) -> Path:
    """Make `path` (and parents) if absent; the folder itself is readable by its owner only."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.chmod(0o700)
    return path


def write_private(path: Path, text: str) -> None:
    """Replace `path` at once by a file of mode 0600: a reader sees the old text or the new, never half."""
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    part.replace(path)
