"""Identity of a fleet, which marks its agents, attempts and reservations in a Ray cluster.

Several fleets may share a cluster. A home's identity is random, created once and stored in the home: neither another
database nor `down` and `up` change it.
"""

import os
import re
import secrets
from pathlib import Path

from cluster.errors import UserError
from cluster.host import tokens
from cluster.input.untrusted_files import UnreadableFile, read_bytes

FILE = "fleet-identity"
FORM = re.compile(r"[0-9a-f]{16}")
_MAX_BYTES = 64


def fleet_identity(home_folder: Path) -> str:
    """Return the home's identity, 16 hexadecimal digits; the first call creates it.

    Raises UserError for an invalid file: with a new identity, no fleet would own what runs under the old one.
    """
    path = tokens.create_token(home_folder / FILE, size_bytes=8)
    try:
        content = read_bytes(path, _MAX_BYTES).decode("ascii", "replace").strip()
    except UnreadableFile as e:
        raise UserError(f"{path} {e.reason}", _REMEDY) from None
    if not FORM.fullmatch(content):
        raise UserError(f"{path} does not contain the fleet's identity", _REMEDY)
    return content


STORAGE_FILE = ".polyfleet-storage"


def storage_identity(folder: Path) -> str:
    """Return the identity of a checkpoint folder, equal for all nodes that share the folder.

    The first node that calls this creates it. "" if it can neither be read nor created.
    """
    path = folder / STORAGE_FILE
    try:
        if not path.exists():
            _make(path)
        content = read_bytes(path, _MAX_BYTES).decode("ascii", "replace").strip()
    except (OSError, UnreadableFile):
        return ""
    return content if FORM.fullmatch(content) else ""


def _make(path: Path) -> None:
    """Create the identity file atomically; of two processes at once one wins.

    Does not change access to the folder.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    part.write_text(secrets.token_hex(8))
    try:
        os.link(part, path)
    except FileExistsError:
        pass
    finally:
        part.unlink()


_REMEDY = "restore it from a backup; without one, run `polyfleet down` and remove the file"


def namespace(identity: str) -> str:
    """Return the fleet's Ray namespace: clients of another namespace cannot look up its actors."""
    return f"polyfleet-{identity}"


def agent_name(ray_id: str) -> str:
    """Return the name of the agent's actor on that node, in its fleet's namespace."""
    return f"agent-{ray_id}"


def reservation_prefix(identity: str) -> str:
    """Return the prefix of the fleet's placement groups, which Ray lists without their namespace."""
    return f"polyfleet-{identity}-attempt-"
