"""Names of hosts as they appear in names of nodes."""

import re


def name_of(host: str) -> str:
    """Turn an SSH destination into a name of a-z, 0-9 and '-'."""
    return re.sub(r"[^a-z0-9]+", "-", host.lower()).strip("-")
