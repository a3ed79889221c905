"""A database by its URL: one connection that writes, some that read, and its errors in our words."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from sqlalchemy import URL, Connection, Engine, create_engine, make_url, select
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.pool import NullPool

from cluster.errors import FleetError, UserError
from orchestrator.store import schema, sqlite

FORMS = "write sqlite:////absolute/path.db or postgresql+psycopg://user@host/name"


class Database:
    """`name` is for people: a path, or a URL without its password."""

    def __init__(self, url: str):
        """Raises UserError for a URL we cannot use, FleetError for a database that is damaged, held or newer."""
        self._url = _parsed(url)
        self._is_sqlite = self._url.get_backend_name() == "sqlite"
        self.name = str(sqlite.path_of(self._url)) if self._is_sqlite else self._url.render_as_string()
        with ExitStack() as opened, self.errors():
            if self._is_sqlite:
                opened.enter_context(sqlite.lock(sqlite.path_of(self._url)))
            self._writer, self._readers = _engines(self._url, self._is_sqlite)
            with self._writer.begin() as connection:
                schema.prepare(connection, self.name)
                self.identity = str(connection.scalar(select(schema.identity.c.name)))
            self._opened = opened.pop_all()

    def connect(self) -> Connection:
        """For the one thread that writes."""
        return self._writer.connect()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Sees all that was committed before. Raises FleetError when the database cannot be read."""
        with self.errors(), self._readers.connect() as connection:
            yield connection

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
        if self._is_sqlite and error.orig is not None:
            return sqlite.trouble(error.orig, sqlite.path_of(self._url))
        return FleetError(f"the job store {self.name} failed: {error.orig}", "check the database server")

    def room(self) -> tuple[int | None, int | None]:
        """(bytes of the database, bytes free on its disk), or None twice where it is not a file here."""
        return sqlite.room(sqlite.path_of(self._url)) if self._is_sqlite else (None, None)

    def close_readers(self) -> None:
        """Before the writing connection is closed: the last one to go checkpoints, and that must be the writer."""
        self._readers.dispose()

    def close(self) -> None:
        self._opened.close()


def _parsed(url: str) -> URL:
    try:
        return make_url(url)
    except ArgumentError:
        raise UserError("the store's URL cannot be read", FORMS) from None


def _engines(url: URL, is_sqlite: bool) -> tuple[Engine, Engine]:
    """(writer, readers)."""
    if is_sqlite:
        return sqlite.engines(url)
    try:
        return create_engine(url, poolclass=NullPool), create_engine(url, pool_pre_ping=True)
    except (NoSuchModuleError, ModuleNotFoundError) as e:
        raise UserError(f"no driver for {url.drivername}: {e}", f"install one such as psycopg; {FORMS}") from None
