"""Secrets of this machine: 256 bits, mode 0600, never printed.

Beside a token that is made anew at each start lies `NAME.made`, the SHA-256 of what we made: a token without one was
written by its user, and is kept.
"""

import hashlib
import os
import secrets
from pathlib import Path

from cluster.errors import FleetError
from cluster.paths import private_dir, write_private


def ensure(path: Path, size_bytes: int = 32) -> Path:
    """Make the token file if it is absent. Two makers at once agree on one: it appears whole or not at all."""
    private_dir(path.parent)
    if not path.exists():
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w") as f:
                f.write(secrets.token_hex(size_bytes))
            os.link(part, path)
        except FileExistsError:
            pass
        finally:
            part.unlink()
    path.chmod(0o600)
    return path


def rotate(path: Path) -> Path:
    """Replace the token by a new one, unless its user wrote it. One process at a time: the caller holds a lock.

    The record comes first and names the old token too: a crash between the two files leaves either one known as ours.
    """
    private_dir(path.parent)
    record = path.with_name(f"{path.name}.made")
    old = [_digest(read(path))] if path.exists() else []
    if old and not (record.exists() and old[0] in record.read_text().split()):
        path.chmod(0o600)
        return path
    token = secrets.token_hex(32)
    write_private(record, "\n".join([*old, _digest(token)]))
    write_private(path, token)
    return path


def foreign_token() -> Path:
    """The token file of a cluster that is not ours: RAY_AUTH_TOKEN_PATH, else ~/.ray/auth_token. Raises FleetError
    without one.
    """
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    if path.is_file():
        return path.absolute()
    raise FleetError(
        f"no token for that Ray cluster at {path}",
        "start Ray with RAY_AUTH_MODE=token and put its token there (0600), or name its file in RAY_AUTH_TOKEN_PATH",
    )


def read(path: Path) -> str:
    return path.read_text().strip()


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
