"""This home's API token, as its clients read it: one that others may have read is refused, as ssh does with a key."""

import stat
from pathlib import Path

from cluster import tokens
from cluster.errors import UserError

NAME = "token"
SHORTEST = 32
"""`GET /healthz` tells an HMAC under the token to everybody, who must not find it by trying."""
ANEW = "run `polyfleet server stop`, remove that file, then run this command again: it makes a new one"


def read(home: Path) -> str:
    """Raises UserError when there is none, when it is no token, or when others may read it."""
    path = home / NAME
    check_token_private(home)
    try:
        token = tokens.read(path)
    except FileNotFoundError:
        raise UserError(
            f"the server runs, but its token {path} is gone",
            "run `polyfleet server stop`, then this command again: it makes a new one",
        ) from None
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"the token {path} cannot be read: {e}", ANEW) from None
    if not (token.isascii() and token.isalnum()):
        raise UserError(f"{path} holds no token", ANEW)
    if len(token) < SHORTEST:
        raise UserError(f"the token {path} has {len(token)} characters, fewer than {SHORTEST}", ANEW)
    return token


def check_token_private(home: Path) -> None:
    """Nothing is refused where there is no token yet."""
    path = home / NAME
    mode = stat.S_IMODE(path.stat().st_mode) if path.is_file() else 0
    if mode & 0o077:
        raise UserError(f"others may read the token {path} (mode {mode:04o})", ANEW)
