"""Open a database by URL: one connection that writes, several that read, and errors translated to FleetError."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Dialect, Engine, Row, Select, Table, make_url, select
from sqlalchemy.exc import ArgumentError, DBAPIError, InvalidRequestError
from sqlalchemy.pool import QueuePool

from cluster.errors import FleetError, UserError
from orchestrator.store.database import database_file_copy, postgresql, schema, sqlite

FORMS = "write sqlite:////absolute/path.db or postgresql://user@host/database"
RECONNECT_S = 5.0
"""Seconds for which reads and writes wait silently while a lost connection is restored."""

RECONNECT_PAUSE_S = 0.05
CLOSE_S = 5.0
"""Seconds that running reads have to finish when the database is closed."""

POSTGRESQL = ("postgresql", "postgres", "postgresql+psycopg")

T = TypeVar("T")


class ConnectionLost(FleetError):
    """The connection to the database broke. It is unknown whether the last commit is stored."""


class Database:
    """A database. `name` is for messages: a path, or a URL without its password."""

    def __init__(self, url: str):
        """Raises UserError for an unsupported URL, FleetError for a database that is damaged, in use or newer."""
        self._url = parse_url(url)
        self._is_sqlite = is_sqlite(self._url)
        self.name = name_of(self._url)
        self._lock: postgresql.AdvisoryLock | None = None
        with ExitStack() as opened, self.translated_errors():
            if self._is_sqlite:
                opened.enter_context(sqlite.lock(sqlite.file_of(self._url)))
            else:
                self._lock = opened.enter_context(postgresql.advisory_lock(self._url))
            self._writer, self._readers = self._engines()
            self._path = sqlite.file_of(self._url) if self._is_sqlite else None
            self._file = sqlite.file_identity(self._path) if self._path else None
            self._is_replaced = self._is_closed = False
            with self._writer.begin() as connection:
                self._check(connection)
                schema.prepare(connection, self.name, self._copy)
                self.identity = str(connection.scalar(select(schema.identity.c.name)))
            self._resources = opened.pop_all()

    def connect(self) -> Connection:
        """Connection for the thread that writes. Raises FleetError if another server now controls the database, or
        its file no longer exists.
        """
        self.check_file()
        if self._lock is not None:
            self._lock.ensure()
        return self._writer.connect()

    def check_file(self) -> None:
        """Raise FleetError, now and at each later call, if the file at the path is no longer the one that was opened:
        SQLite would keep writing to the deleted file, and acknowledged data would be lost.
        """
        if self._path:
            self._is_replaced = self._is_replaced or sqlite.file_identity(self._path) != self._file
            if self._is_replaced:
                raise sqlite.replaced_error(self._path)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Yield a connection that sees everything committed before. Like `rows`, it waits while the database is not
        available; it does not repeat reads if the connection breaks inside the context. Raises FleetError if the
        database cannot be read.
        """
        with self.translated_errors(), self._reader() as connection:
            yield connection

    def _reader(self) -> Connection:
        return self._retry_connection(self._readers_connection)

    def _readers_connection(self) -> Connection:
        """A connection of the pool, which tries two and raises its own error if both were closed by the server."""
        if self._is_closed:
            raise FleetError(f"{self.name} is being closed", "the server is stopping: retry when a server runs again")
        self.check_file()
        try:
            with self.translated_errors():
                return self._readers.connect()
        except InvalidRequestError as e:
            raise ConnectionLost(
                f"the connection to {self.name} broke: {e}", "retry: the server restores the connection"
            ) from e

    def _retry_connection(self, read: Callable[[], T]) -> T:
        """Call `read`, again for up to RECONNECT_S if the connection is lost."""
        started_s = time.monotonic()
        while True:
            try:
                return read()
            except ConnectionLost:
                if time.monotonic() - started_s > RECONNECT_S:
                    raise
                time.sleep(RECONNECT_PAUSE_S)

    def rows(self, query: Select[Any], **parameters: Any) -> Sequence[Row[Any]]:
        """Read all rows, again if the connection breaks. Raises FleetError as `reading` does."""

        def read() -> Sequence[Row[Any]]:
            with self.translated_errors(), self._readers_connection() as connection:
                return connection.execute(query, parameters).all()

        return self._retry_connection(read)

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Translate errors of the driver and the file system inside the context to FleetError."""
        try:
            yield
        except DBAPIError as e:
            raise self.translate(e) from e
        except OSError as e:
            raise FleetError(
                f"{self.name} cannot be opened: {e.strerror or e}", "check the folder and its permissions"
            ) from e

    def translate(self, error: DBAPIError) -> FleetError:
        return translate_error(error, self._url)

    def disk_space(self) -> tuple[int | None, int | None]:
        """(bytes of the database, bytes free on its disk), or (None, None) if it is not a local file."""
        return sqlite.disk_space(self._path) if self._path else (None, None)

    def close_readers(self) -> None:
        """Close the readers, which must happen before the writer is closed: SQLite checkpoints when the last connection
        closes, and that must be the writer. No reads are possible afterwards.
        """
        self._is_closed = True
        deadline_s = time.monotonic() + CLOSE_S
        while self._are_reading and time.monotonic() < deadline_s:
            time.sleep(RECONNECT_PAUSE_S)
        self._readers.dispose()

    def close(self) -> None:
        self._resources.close()

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
        """Copy a SQLite file before its tables are upgraded. PostgreSQL rolls back an upgrade that fails."""
        if self._is_sqlite:
            database_file_copy.copy_before_upgrade(sqlite.file_of(self._url), version)


def parse_url(url: str) -> URL:
    """Parse a database URL. Raises UserError for an unsupported one."""
    try:
        database_url = make_url(url)
    except (ArgumentError, ValueError):
        raise UserError("the job store's URL is not valid", FORMS) from None
    if database_url.drivername in POSTGRESQL:
        return database_url.set(drivername="postgresql+psycopg")
    if database_url.get_backend_name() != "sqlite":
        raise UserError(f"{database_url.drivername} is not supported as a job store", FORMS)
    return database_url


def is_sqlite(url: URL) -> bool:
    return url.get_backend_name() == "sqlite"


def name_of(url: URL) -> str:
    return str(sqlite.file_of(url)) if is_sqlite(url) else postgresql.name_of(url)


def translate_error(error: DBAPIError, url: URL) -> FleetError:
    """Translate the error of a failed statement to a message for users."""
    if is_sqlite(url) and error.orig is not None:
        return sqlite.translate_error(error.orig, sqlite.file_of(url))
    kind = ConnectionLost if postgresql.is_connection_lost(error) else FleetError
    return kind(*postgresql.translate_error(error, postgresql.name_of(url)))


def sqlite_url(path: Path) -> str:
    return f"sqlite:///{path.absolute()}"


def insert_rows(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    """Insert rows with the same columns. It takes half the time of `execute(table.insert(), rows)`, because SQLAlchemy
    processes every value of every row.
    """
    statement, names = _insert(table, connection.dialect, tuple(rows[0]))
    connection.exec_driver_sql(statement, [tuple(row[name] for name in names) for row in rows] if names else rows)


@cache
def _insert(table: Table, dialect: Dialect, columns: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """(statement for the driver, columns in its order, or none if the driver takes them by name)"""
    compiled: Any = table.insert().inline().compile(dialect=dialect, column_keys=columns)
    return str(compiled), tuple(compiled.positiontup or ())
