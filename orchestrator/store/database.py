"""A database by its URL: one connection that writes, some that read, and its errors in our words."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, Row, Select, make_url, select
from sqlalchemy.exc import ArgumentError, DBAPIError, InvalidRequestError
from sqlalchemy.pool import QueuePool

from cluster.errors import FleetError, UserError
from orchestrator.store import database_file_copy, postgresql, schema, sqlite

FORMS = "write sqlite:////absolute/path.db or postgresql://user@host/database"
RECONNECT_S = 5.0
"""For how long a lost connection is made again without a word to those who wait: those who read as those who write."""

RECONNECT_PAUSE_S = 0.05
CLOSE_S = 5.0
"""For how long those who read may still do so when the database is closed."""

POSTGRESQL = ("postgresql", "postgres", "postgresql+psycopg")

T = TypeVar("T")


class ConnectionLost(FleetError):
    """The connection to the database broke. Whether what was just committed is stored is not known."""


class Database:
    """`name` is for people: a path, or a URL without its password."""

    def __init__(self, url: str):
        """Raises UserError for a URL we cannot use, FleetError for a database that is damaged, held or newer."""
        self._url = parsed(url)
        self._is_sqlite = is_sqlite(self._url)
        self.name = name_of(self._url)
        self._lock: postgresql.Lock | None = None
        with ExitStack() as opened, self.errors():
            if self._is_sqlite:
                opened.enter_context(sqlite.lock(sqlite.path_of(self._url)))
            else:
                self._lock = opened.enter_context(postgresql.locked(self._url))
            self._writer, self._readers = self._engines()
            self._path = sqlite.path_of(self._url) if self._is_sqlite else None
            self._file = sqlite.file_at(self._path) if self._path else None
            self._is_replaced = self._is_closed = False
            with self._writer.begin() as connection:
                self._check(connection)
                schema.prepare(connection, self.name, self._copy)
                self.identity = str(connection.scalar(select(schema.identity.c.name)))
            self._opened = opened.pop_all()

    def connect(self) -> Connection:
        """For the one thread that writes. Raises FleetError when another server has the database by now, or its file is
        not there any more.
        """
        self.check_place()
        if self._lock is not None:
            self._lock.hold()
        return self._writer.connect()

    def check_place(self) -> None:
        """Raises FleetError, from then on always, where the file at the path is not the one that was opened: SQLite
        writes on into a file without a name, and whatever is acknowledged is lost.
        """
        if self._path:
            self._is_replaced = self._is_replaced or sqlite.file_at(self._path) != self._file
            if self._is_replaced:
                raise sqlite.replaced(self._path)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Sees all that was committed before. Waits while the database is away, as `rows`; it is not asked again for
        what was read when the connection breaks inside. Raises FleetError when the database cannot be read.
        """
        with self.errors(), self._reader() as connection:
            yield connection

    def _reader(self) -> Connection:
        return self._patiently(self._readers_connection)

    def _readers_connection(self) -> Connection:
        """The pool tries two connections, and has an error of its own where both were killed meanwhile."""
        if self._is_closed:
            raise FleetError(f"{self.name} is being closed", "the server stops: ask again once it is up")
        self.check_place()
        try:
            with self.errors():
                return self._readers.connect()
        except InvalidRequestError as e:
            raise ConnectionLost(f"the connection to {self.name} broke: {e}", "it is made again: ask again") from e

    def _patiently(self, read: Callable[[], T]) -> T:
        """Asked again for RECONNECT_S where the connection is lost."""
        begun_s = time.monotonic()
        while True:
            try:
                return read()
            except ConnectionLost:
                if time.monotonic() - begun_s > RECONNECT_S:
                    raise
                time.sleep(RECONNECT_PAUSE_S)

    def rows(self, wanted: Select[Any], **parameters: Any) -> Sequence[Row[Any]]:
        """All of them, asked for again where the connection breaks meanwhile. Raises FleetError as `reading` does."""

        def read() -> Sequence[Row[Any]]:
            with self.errors(), self._readers_connection() as connection:
                return connection.execute(wanted, parameters).all()

        return self._patiently(read)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """What the driver or the file system raises inside comes out as FleetError."""
        try:
            yield
        except DBAPIError as e:
            raise self.trouble(e) from e
        except OSError as e:
            raise FleetError(f"{self.name} cannot be opened: {e.strerror or e}", "check the folder and its mode") from e

    def trouble(self, error: DBAPIError) -> FleetError:
        return translate_error(error, self._url)

    def room(self) -> tuple[int | None, int | None]:
        """(bytes of the database, bytes free on its disk), or None twice where it is not a file here."""
        return sqlite.disk_space(self._path) if self._path else (None, None)

    def close_readers(self) -> None:
        """Before the writing connection is closed: the last one to go checkpoints, and that must be the writer. Nobody
        reads from here on.
        """
        self._is_closed = True
        deadline_s = time.monotonic() + CLOSE_S
        while self._are_reading and time.monotonic() < deadline_s:
            time.sleep(RECONNECT_PAUSE_S)
        self._readers.dispose()

    def close(self) -> None:
        self._opened.close()

    @property
    def _are_reading(self) -> bool:
        return isinstance(self._readers.pool, QueuePool) and self._readers.pool.checkedout() > 0

    def _engines(self) -> tuple[Engine, Engine]:
        return sqlite.engines(self._url) if self._is_sqlite else postgresql.engines(self._url)

    def _check(self, connection: Connection) -> None:
        if self._is_sqlite:
            sqlite.check(connection)
        else:
            postgresql.check(connection, self.name)

    def _copy(self, version: int) -> None:
        """Before the tables are changed. PostgreSQL takes a change back that fails; `backup` makes a copy of it."""
        if self._is_sqlite:
            database_file_copy.before_upgrade(sqlite.path_of(self._url), version)


def parsed(url: str) -> URL:
    """Raises UserError for one that names no database we can use."""
    try:
        found = make_url(url)
    except (ArgumentError, ValueError):
        raise UserError("the store's URL cannot be read", FORMS) from None
    if found.drivername in POSTGRESQL:
        return found.set(drivername="postgresql+psycopg")
    if found.get_backend_name() != "sqlite":
        raise UserError(f"no job store can be in {found.drivername}", FORMS)
    return found


def is_sqlite(url: URL) -> bool:
    return url.get_backend_name() == "sqlite"


def name_of(url: URL) -> str:
    return str(sqlite.path_of(url)) if is_sqlite(url) else postgresql.name_of(url)


def translate_error(error: DBAPIError, url: URL) -> FleetError:
    """What a failed statement means to a person."""
    if is_sqlite(url) and error.orig is not None:
        return sqlite.translate_error(error.orig, sqlite.path_of(url))
    kind = ConnectionLost if postgresql.lost(error) else FleetError
    return kind(*postgresql.translate_error(error, postgresql.name_of(url)))


def sqlite_url(path: Path) -> str:
    return f"sqlite:///{path.absolute()}"
