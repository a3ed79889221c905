"""Secret tokens of this machine: 256 bits, mode 0600, never printed.

A token that is replaced at each start has a file `NAME.made` beside it, with the SHA-256 of the token that we wrote. A
token without that file was written by its user and is never replaced.
"""

import hashlib
import os
import secrets
from pathlib import Path

from cluster.errors import FleetError
from cluster.paths import private_dir, write_private


def create_token(path: Path, size_bytes: int = 32) -> Path:
    """Create the token file if it is absent.

    Atomic: two processes that create it at once get the same token.
    """
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
    """Replace the token by a new one, unless its user wrote it.

    One process at a time: the caller holds a lock.

    The `.made` file is written first and lists the old token too: after a crash between the two writes, either token is
    recognised as ours.
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


def external_token() -> Path:
    """Return the token file of a cluster that others run: RAY_AUTH_TOKEN_PATH, else ~/.ray/auth_token.

    Raises FleetError if there is none.
    """
    configured = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(configured) if configured else Path.home() / ".ray" / "auth_token"
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
