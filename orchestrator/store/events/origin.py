"""Record with which database a fleet was started: an emptied or replaced one does not know the fleet's jobs."""

import json
from pathlib import Path

from cluster.paths import write_private

FILE = "fleet-store.json"


def is_other_database(home: Path, fleet: str, identity: str) -> bool:
    """Return whether the fleet was started with another database. For a new fleet, record this one."""
    path = home / FILE
    try:
        recorded = json.loads(path.read_text())
        if recorded["fleet"] == fleet:
            return bool(recorded["store"] != identity)
    except (OSError, ValueError, TypeError, KeyError):
        pass  # no record yet, or an incomplete one after a full disk: record this database
    write_private(path, json.dumps({"fleet": fleet, "store": identity}))
    return False
