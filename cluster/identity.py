"""Whose agents, attempts and reservations those in a Ray cluster are: a fleet may share the cluster with others.

A home's identity is random, made once and kept with the home: neither another database nor `down` and `up` change it.
"""

import os
import re
import secrets
from pathlib import Path

from cluster import tokens
from cluster.errors import UserError
from cluster.untrusted_files import UnreadableFile, read_bytes

FILE = "fleet-identity"
FORM = re.compile(r"[0-9a-f]{16}")
_LONGEST_BYTES = 64


def fleet_identity(home: Path) -> str:
    """16 hexadecimal digits; made by the first call. Raises UserError for a file that holds something else: with a new
    identity, what runs under the old one would be nobody's.
    """
    path = tokens.ensure(home / FILE, size_bytes=8)
    try:
        found = read_bytes(path, _LONGEST_BYTES).decode("ascii", "replace").strip()
    except UnreadableFile as e:
        raise UserError(f"{path} {e.why}", _REMEDY) from None
    if not FORM.fullmatch(found):
        raise UserError(f"{path} does not hold the fleet's identity", _REMEDY)
    return found


STORAGE_FILE = ".polyfleet-storage"


def storage_identity(folder: Path) -> str:
    """Of a checkpoint folder: equal for all nodes that see the same one. Made by the first that looks; "" where it can
    neither be read nor made.
    """
    path = folder / STORAGE_FILE
    try:
        if not path.exists():
            _make(path)
        found = read_bytes(path, _LONGEST_BYTES).decode("ascii", "replace").strip()
    except (OSError, UnreadableFile):
        return ""
    return found if FORM.fullmatch(found) else ""


def _make(path: Path) -> None:
    """Whole or not at all; of two makers at once one wins. Nobody's access to the folder is changed."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    part.write_text(secrets.token_hex(8))
    try:
        os.link(part, path)
    except FileExistsError:
        pass
    finally:
        part.unlink()


_REMEDY = "restore it from a backup; without one, `polyfleet down` and remove it"


def namespace(identity: str) -> str:
    """Of Ray: names of actors in it are found by nobody who uses another."""
    return f"polyfleet-{identity}"


def agent_name(ray_id: str) -> str:
    """Of the actor on that node, in its fleet's namespace."""
    return f"agent-{ray_id}"


def reservation_prefix(identity: str) -> str:
    """Of the names of placement groups, which Ray lists without their namespace."""
    return f"polyfleet-{identity}-attempt-"
