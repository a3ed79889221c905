"""Secrets of this machine: made once, 256 bits, mode 0600, never printed."""

import os
import secrets
from pathlib import Path

from cluster.paths import private_dir


def ensure(path: Path) -> Path:
    """Make the token file if it is absent. Two makers at once agree on one: it appears whole or not at all."""
    private_dir(path.parent)
    if not path.exists():
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w") as f:
                f.write(secrets.token_hex(32))
            os.link(part, path)
        except FileExistsError:
            pass
        finally:
            part.unlink()
    path.chmod(0o600)
    return path


def read(path: Path) -> str:
    return path.read_text().strip()
