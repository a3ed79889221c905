"""Everything specific to PostgreSQL is in this file.

An advisory lock on a separate session keeps a second server out. A session ends with its connection, so the lock alone
is no proof later: in each transaction, the writer also checks that its own token is in the table `writer`, or writes
nothing.
"""

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError, DisconnectionError, NoSuchModuleError
from sqlalchemy.pool import NullPool

from cluster.errors import FleetError, UserError

log = logging.getLogger(__name__)

LOCK_WAIT_S = 5
WRITE_S = 10.0
READ_S = 60.0
PING_S = 4.0
CONNECT_S = 3
LOCK_CLASS = 0x706F6C79
"""First of the advisory lock's two numbers; the second depends on the schema, so that two schemas are two stores."""

ACQUIRE_QUERY = text("SELECT pg_try_advisory_lock(:ours, hashtext(current_schema()))")
RELEASE_QUERY = text("SELECT pg_advisory_unlock(:ours, hashtext(current_schema()))")

SESSION = {
    "lock_timeout": f"{LOCK_WAIT_S}s",
    "idle_session_timeout": "0",
    "idle_in_transaction_session_timeout": "60s",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}
"""With the server's defaults, the lock of a machine that lost power would stay for two hours."""

NEEDS_DRIVER = "install it: pip install 'polyfleet[postgresql]'"
UNAVAILABLE_STATES = ("57P01", "57P02", "57P03", "57P05")
"""States: the server is being stopped, has crashed, is starting, or ended an idle session."""
CONNECTION_CLASS = "08"
REFUSED_CLASSES = ("28", "3D")
"""Classes of states: CONNECTION: the connection failed; REFUSED: the password, user or database is wrong."""


def name_of(url: URL) -> str:
    """URL for messages: without the password, and without options, which may contain one."""
    host = url.query.get("host", "")
    query = {"host": host} if host else {}
    public_url = URL.create("postgresql", url.username, None, url.host, url.port, url.database, query)
    return public_url.render_as_string()


def without_password(url: URL) -> URL:
    rest = url.difference_update_query(["password"])
    return URL.create(rest.drivername, rest.username, None, rest.host, rest.port, rest.database, rest.query)


def engines(url: URL) -> tuple[Engine, Engine]:
    """(writer, readers)."""
    writer = _engine(url, WRITE_S, poolclass=NullPool)
    readers = _engine(url, READ_S, pool_size=8, max_overflow=24)
    event.listen(writer, "connect", _set_durable)
    event.listen(readers, "checkout", _check_pooled)
    return writer, readers


def check(connection: Connection, name: str) -> None:
    """Check the database in the transaction that opens the store, without a time limit, because it may include an
    upgrade. Raises UserError for a database that is not encoded in UTF-8.
    """
    driver: Any = connection.connection.driver_connection
    driver.limit_s = None
    if (encoding := connection.scalar(text("SHOW server_encoding"))) != "UTF8":
        remedy = "create another one: CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
        raise UserError(f"{name} has the encoding {encoding}; the job store needs UTF8", remedy)
    if connection.scalar(text("SHOW fsync")) == "off":
        log.warning("%s runs with fsync=off: a power failure there loses accepted jobs", name)


class AdvisoryLock:
    """Advisory lock that makes this server the database's only one, until it is closed or the connection is lost."""

    def __init__(self, url: URL):
        """Raises FleetError if another server has the lock; it names that server's host, process and start time."""
        self._name = name_of(url)
        self._session = f"polyfleet on {socket.gethostname()[:24]}, process {os.getpid()} {secrets.token_hex(4)}"
        self._engine = _engine(url, LOCK_WAIT_S, self._session, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        self._connection: Connection | None = None
        self.ensure()

    def ensure(self) -> None:
        """Acquire the lock again if its session has ended. Raises FleetError as the constructor does."""
        if self._connection is not None and not self._is_alive(self._connection):
            self.close()
        if self._connection is None:
            connection = self._engine.connect()
            try:
                self._acquire(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection

    def close(self) -> None:
        """Release the lock explicitly: PostgreSQL ends a session only some time after its connection."""
        if self._connection is not None:
            with contextlib.suppress(DBAPIError):
                if not self._connection.invalidated:
                    self._connection.execute(RELEASE_QUERY, {"ours": LOCK_CLASS})
                self._connection.close()
            self._connection = None

    def _is_alive(self, connection: Connection) -> bool:
        try:
            connection.execute(text("SELECT 1"))
        except DBAPIError:
            connection.invalidate()
            return False
        return True

    def _acquire(self, connection: Connection) -> None:
        """Acquire the lock. If a lost session of this process still has it, end that session first."""
        deadline = time.monotonic() + LOCK_WAIT_S
        while not connection.scalar(ACQUIRE_QUERY, {"ours": LOCK_CLASS}):
            holder = self._holder(connection)
            if holder is not None and holder.application_name != self._session:
                raise FleetError(
                    f"another server has {self._name} open: {_describe_session(holder)}",
                    "stop that server, or use a separate database for this home",
                )
            if holder is not None:
                connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": holder.pid})
            if time.monotonic() > deadline:
                raise FleetError(
                    f"the lock of {self._name} was not released within {LOCK_WAIT_S} s", "retry in a few seconds"
                )
            time.sleep(0.05)

    def _holder(self, connection: Connection) -> Any:
        """Session that has the lock; None if it was released in the meantime."""
        query = text(
            "SELECT a.pid, a.application_name, a.client_addr, a.backend_start FROM pg_locks l"
            " JOIN pg_stat_activity a ON a.pid = l.pid WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2"
            " AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            " AND l.classid::bigint = :ours AND l.objid::bigint = hashtext(current_schema())::bigint & 4294967295"
        )
        return connection.execute(query, {"ours": LOCK_CLASS}).first()


def _describe_session(holder: Any) -> str:
    session = holder.application_name.rpartition(" ")[0] or "a session without a name"
    host = f" from {holder.client_addr}" if holder.client_addr else ""
    since = f" since {holder.backend_start:%Y-%m-%d %H:%M:%S %Z}" if holder.backend_start else ""
    return f"{session}{host}{since}"


def is_connection_lost(error: DBAPIError) -> bool:
    """Return whether the connection was lost or could not be made, so that a new one may work."""
    import psycopg

    if not isinstance(error.orig, psycopg.OperationalError):
        return error.connection_invalidated
    state = error.orig.sqlstate or CONNECTION_CLASS
    return error.connection_invalidated or state.startswith(CONNECTION_CLASS) or state in UNAVAILABLE_STATES


def translate_error(error: DBAPIError, name: str) -> tuple[str, str]:
    """(message, remedy) for the error of a failed statement."""
    state = getattr(error.orig, "sqlstate", None) or ""
    message = " ".join(str(error.orig).split())
    if state == "55P03":
        return (
            f"the job store {name} is locked by another program",
            "end the session that has its tables locked; pg_locks shows it",
        )
    if state == "53100":
        return f"the job store {name} cannot be written: its disk is full", "free disk space on the database server"
    if state.startswith(REFUSED_CLASSES) or "authentication failed" in message or "no password supplied" in message:
        return f"the job store {name} cannot be opened: {message}", "check user and password in POLYFLEET_DATABASE_URL"
    return f"the job store {name} failed: {message}", "check the database server"


def _engine(url: URL, limit_s: float, session: str = "polyfleet store", **pool: Any) -> Engine:
    """Make an engine. `limit_s` is the time limit of one call; see postgresql_timeouts.py."""
    settings = " ".join(f"-c {key}={value}" for key, value in SESSION.items())
    url_options = url.query.get("options", "")
    arguments = {
        "connect_timeout": CONNECT_S,
        "application_name": session,
        "options": f"{url_options} {settings}".strip(),
        "tcp_user_timeout": 20_000,
    }
    try:
        engine = create_engine(url.difference_update_query(["options"]), connect_args=arguments, **pool)
        from orchestrator.store.database.postgresql_timeouts import TimeLimitedConnection
    except (NoSuchModuleError, ModuleNotFoundError) as e:
        raise UserError(f"PostgreSQL's driver psycopg is missing: {e}", NEEDS_DRIVER) from None

    @event.listens_for(engine, "do_connect")
    def _connect(_dialect: Any, _record: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        connection = TimeLimitedConnection.connect(*args, **kwargs)
        connection.limit_s = limit_s
        return connection

    return engine


def _check_pooled(connection: Any, _record: Any, _proxy: Any) -> None:
    """Check a connection of the pool; on failure the pool makes another. Like pool_pre_ping, with a time limit."""
    connection.limit_s = PING_S
    try:
        connection.execute("SELECT 1")
        connection.rollback()
    except connection.OperationalError as e:
        raise DisconnectionError from e
    connection.limit_s = READ_S


def _set_durable(connection: Any, _record: Any) -> None:
    """Make commits wait until they are on disk, even if the database or the user is configured otherwise."""
    statement = (
        "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
    )
    connection.execute(statement)
    connection.commit()


@contextlib.contextmanager
def advisory_lock(url: URL) -> Iterator[AdvisoryLock]:
    lock = AdvisoryLock(url)
    try:
        yield lock
    finally:
        lock.close()
