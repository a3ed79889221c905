"""A PostgreSQL of our own, for tests alone."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from second_user import NOBODY


class PostgreSQL:
    """A cluster of our own on a Unix socket in `folder`; PostgreSQL refuses to run as root, so then as nobody."""

    def __init__(self, folder: Path, programs: Path):
        self.folder, self._programs, self._databases = folder, programs, 0
        self._free: list[str] = []
        self.user = "polyfleet"
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        words = ["--no-sync", "--auth=trust", "--encoding=UTF8", "--locale=C", f"--username={self.user}"]
        self._run("initdb", *words, "-D", str(folder / "data"))
        settings = ["listen_addresses = ''", f"unix_socket_directories = '{folder}'", "fsync = off"]
        with (folder / "data" / "postgresql.conf").open("a") as f:
            f.write("\n".join([*settings, "max_connections = 200", ""]))

    def start(self) -> None:
        self._run("pg_ctl", "start", "-w", "-t", "60", "-D", str(self.folder / "data"), "-l", str(self.folder / "log"))

    def stop(self, how: str = "immediate") -> None:
        self._run("pg_ctl", "stop", "-w", "-t", "60", "-m", how, "-D", str(self.folder / "data"))

    def restart(self) -> None:
        """As after a crash: no connection is told, the log is replayed."""
        self.stop()
        self.start()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Every process of it is stopped: connections are accepted by the kernel, and nothing answers."""
        first = psutil.Process(int((self.folder / "data" / "postmaster.pid").read_text().split()[0]))
        processes = [first, *first.children(recursive=True)]
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.resume()

    def url(self) -> str:
        """Of an empty database."""
        if self._free:
            return self._free.pop()
        self._databases += 1
        name = f"test_{self._databases}"
        self.sql("postgres", f"CREATE DATABASE {name} TEMPLATE template0")
        return f"postgresql://{self.user}@/{name}?host={self.folder}"

    def give_back(self, url: str) -> None:
        """For another test: a database has 300 files, and emptying one is quicker than making one."""
        name = url.partition("@/")[2].partition("?")[0]
        others = "datname = current_database() AND pid <> pg_backend_pid()"
        self.sql(url, f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE {others}")
        made = "nspname NOT LIKE 'pg\\_%' AND nspname <> 'information_schema'"
        schemas = [schema for (schema,) in self.sql(url, f"SELECT nspname FROM pg_namespace WHERE {made}")]
        dropped = [f'DROP SCHEMA "{schema}" CASCADE' for schema in schemas]
        self.sql(url, *dropped, "CREATE SCHEMA public", f"ALTER DATABASE {name} RESET ALL")
        self._free.append(url)

    def sql(self, database: str, *statements: str) -> list[tuple[Any, ...]]:
        """The rows of the last statement, by a connection of its own. `database` may be a URL of ours."""
        import psycopg

        name = database.partition("@/")[2].partition("?")[0] or database
        where = {"dbname": name, "user": self.user, "host": str(self.folder)}
        with psycopg.connect(**where, autocommit=True) as connection:
            for statement in statements:
                found = connection.execute(statement.encode())
            return found.fetchall() if found.description else []

    def _run(self, program: str, *arguments: str) -> None:
        as_nobody = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        ran = subprocess.run(
            [str(self._programs / program), *arguments],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if program == "initdb" else subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            **as_nobody,  # type: ignore[call-overload]
        )
        log = self.folder / "log"
        assert ran.returncode == 0, f"{program}: {ran.stdout} {log.read_text() if log.exists() else ''}"
