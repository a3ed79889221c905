"""Read this home's API token. A token that other users can read is refused, as ssh does with a key."""

import stat
from pathlib import Path

from cluster.errors import UserError
from cluster.host import tokens

NAME = "token"
MIN_LENGTH = 32
"""Minimum length: `GET /healthz` sends an HMAC under the token to any client, which must not find it by brute force."""
REMEDY = "run `polyfleet server stop`, remove that file, then run this command again: it creates a new token"


def read(home: Path) -> str:
    """Read the token. Raises UserError if it is missing or invalid, or if other users can read it."""
    path = home / NAME
    check_token_private(home)
    try:
        token = tokens.read(path)
    except FileNotFoundError:
        raise UserError(
            f"the server runs, but its token {path} does not exist",
            "run `polyfleet server stop`, then this command again: it creates a new token",
        ) from None
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"the token {path} cannot be read: {e}", REMEDY) from None
    if not (token.isascii() and token.isalnum()):
        raise UserError(f"{path} does not contain a valid token", REMEDY)
    if len(token) < MIN_LENGTH:
        raise UserError(f"the token {path} has {len(token)} characters; the minimum is {MIN_LENGTH}", REMEDY)
    return token


def check_token_private(home: Path) -> None:
    """Raise UserError if other users can read the token; do nothing if there is no token yet."""
    path = home / NAME
    mode = stat.S_IMODE(path.stat().st_mode) if path.is_file() else 0
    if mode & 0o077:
        raise UserError(f"other users can read the token {path} (mode {mode:04o})", REMEDY)
