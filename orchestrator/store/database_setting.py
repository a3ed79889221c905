"""Which database a home's jobs are in: POLYFLEET_DATABASE_URL, else the home's file `database-url`, else a SQLite file.

Imports no SQLAlchemy before it is needed: every start of the command line passes here.
"""

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import UserError
from cluster.paths import write_private

if TYPE_CHECKING:
    from orchestrator.store.event_store import EventStore

VARIABLE = "POLYFLEET_DATABASE_URL"
FILE = "database-url"
SQLITE = "polyfleet.db"


def database_url(home: Path) -> str:
    """Raises UserError for a file that others may read: it can hold a password."""
    return os.environ.get(VARIABLE, "").strip() or _written(home) or default_url(home)


def default_url(home: Path) -> str:
    return f"sqlite:///{home / SQLITE}"


def written_url(home: Path) -> str:
    """Of a home by its files alone: another one than this process's, of which the variable says nothing."""
    return _written(home) or default_url(home)


def name_of_database(home: Path) -> str:
    """For people, without a password."""
    url = database_url(home)
    if url == default_url(home):
        return str(home / SQLITE)
    from orchestrator.store.database import name_of, parsed

    return name_of(parsed(url))


def open_store(home: Path) -> "EventStore":
    """The home's store. The choice of another database than the default is remembered, without its password: a server
    that somebody starts from a shell without the variable asks for the password, and never shows an empty database.
    """
    from orchestrator.store.database import name_of, parsed
    from orchestrator.store.event_store import EventStore
    from orchestrator.store.postgresql import without_password

    url = database_url(home)
    store = EventStore(url)
    known = written_url(home)
    if name_of(parsed(known)) != name_of(parsed(url)):
        write_private(home / FILE, without_password(parsed(url)).render_as_string() + "\n")
    return store


def strip_password(url: str) -> str:
    """`url`, unless it has a password: every user of the machine can read a command line. Raises UserError then."""
    from orchestrator.store.database import parsed
    from orchestrator.store.postgresql import without_password

    found = parsed(url)
    if without_password(found) != found:
        raise UserError(
            "a password on the command line can be read by every user of this machine",
            f"set {VARIABLE}, or leave the password to ~/.pgpass",
        )
    return url


def _written(home: Path) -> str:
    """What the file says, "" without one."""
    path = home / FILE
    try:
        with path.open() as f:
            found = os.fstat(f.fileno())
            if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                mode = stat.S_IMODE(found.st_mode)
                raise UserError(f"{path} is open to other users (mode {mode:04o})", f"close it: chmod 600 {path}")
            return f.read(4096).strip()
    except FileNotFoundError:
        return ""
