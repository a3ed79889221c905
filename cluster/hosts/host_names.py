"""How hosts are called in the names of nodes."""

import re


def name_of(host: str) -> str:
    """Of the word by which `ssh` reaches it: a-z, 0-9 and '-'."""
    return re.sub(r"[^a-z0-9]+", "-", host.lower()).strip("-")
