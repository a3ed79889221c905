"""Setting of a home's database: POLYFLEET_DATABASE_URL, else the home's file `database-url`, else a SQLite file.
It also records with which database a fleet was started: an emptied or replaced one does not know the fleet's jobs.

It imports SQLAlchemy only if needed, because every start of the command line runs this module.
"""

import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import UserError
from cluster.paths import write_private

if TYPE_CHECKING:
    from orchestrator.store.events.event_store import EventStore

VARIABLE = "POLYFLEET_DATABASE_URL"
FILE = "database-url"
SQLITE = "polyfleet.db"
ORIGIN_FILE = "fleet-store.json"


def database_url(home: Path) -> str:
    """URL of the home's database. Raises UserError if other users can read its file, which may contain a password."""
    return os.environ.get(VARIABLE, "").strip() or _read_file(home) or default_url(home)


def default_url(home: Path) -> str:
    return f"sqlite:///{home / SQLITE}"


def recorded_url(home: Path) -> str:
    """URL in a home's files, without the environment variable, which applies only to this process's home."""
    return _read_file(home) or default_url(home)


def name_of_database(home: Path) -> str:
    """Name of the database for messages, without a password."""
    url = database_url(home)
    if url == default_url(home):
        return str(home / SQLITE)
    from orchestrator.store.database.database import name_of, parse_url

    return name_of(parse_url(url))


def open_store(home: Path) -> "EventStore":
    """Open the home's store. A database other than the default is recorded in the home, without its password: a server
    that is started later without the variable then requires the password, instead of opening an empty database.
    """
    from orchestrator.store.database.database import name_of, parse_url
    from orchestrator.store.database.postgresql import without_password
    from orchestrator.store.events.event_store import EventStore

    url = database_url(home)
    store = EventStore(url)
    recorded = recorded_url(home)
    if name_of(parse_url(recorded)) != name_of(parse_url(url)):
        write_private(home / FILE, without_password(parse_url(url)).render_as_string() + "\n")
    return store


def strip_password(url: str) -> str:
    """Return `url`. Raises UserError if it has a password: every user of the machine can read a command line."""
    from orchestrator.store.database.database import parse_url
    from orchestrator.store.database.postgresql import without_password

    database_url = parse_url(url)
    if without_password(database_url) != database_url:
        raise UserError(
            "a password on the command line can be read by every user of this machine",
            f"set {VARIABLE}, or write the password into ~/.pgpass",
        )
    return url


def is_other_database(home: Path, fleet: str, identity: str) -> bool:
    """Return whether the fleet was started with another database. For a new fleet, record this one."""
    path = home / ORIGIN_FILE
    try:
        recorded = json.loads(path.read_text())
        if recorded["fleet"] == fleet:
            return bool(recorded["store"] != identity)
    except (OSError, ValueError, TypeError, KeyError):
        pass  # no record yet, or an incomplete one after a full disk: record this database
    write_private(path, json.dumps({"fleet": fleet, "store": identity}))
    return False


def _read_file(home: Path) -> str:
    """Content of the home's file, "" if there is none."""
    path = home / FILE
    try:
        with path.open() as f:
            status = os.fstat(f.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                mode = stat.S_IMODE(status.st_mode)
                raise UserError(f"other users can read {path} (mode {mode:04o})", f"run `chmod 600 {path}`")
            return f.read(4096).strip()
    except FileNotFoundError:
        return ""
