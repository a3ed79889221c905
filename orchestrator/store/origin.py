"""Which database a fleet began with: one that is emptied or replaced does not know what runs there."""

import json
from pathlib import Path

from cluster.paths import write_private

FILE = "fleet-store.json"


def replaced(home: Path, fleet: str, identity: str) -> bool:
    """Whether the fleet at that address began with another database than this. A new fleet's is written down."""
    path = home / FILE
    try:
        known = json.loads(path.read_text())
        if known["fleet"] == fleet:
            return bool(known["store"] != identity)
    except (OSError, ValueError, TypeError, KeyError):
        pass  # none yet, or half written by a full disk: then this one is taken
    write_private(path, json.dumps({"fleet": fleet, "store": identity}))
    return False
