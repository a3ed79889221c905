"""Read the log of a server, running or not, from its home, its database or a backup file.

Nothing is written.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, exists, inspect, select

from cluster.errors import UserError
from cluster.paths import home
from orchestrator.core.jobs.fold import Record
from orchestrator.core.throughput import Key, Measured, Throughput
from orchestrator.runtime.benchmarks import throughput
from orchestrator.simulation.log_trace import JobStoreLog
from orchestrator.store.database import sqlite
from orchestrator.store.database.backup import ROWS_AT_ONCE, snapshot, version_in
from orchestrator.store.database.database import name_of, parse_url, sqlite_url
from orchestrator.store.database.schema import benchmark_lines, events, removals
from orchestrator.store.events import database_setting
from orchestrator.store.rows.damaged_rows import DamagedDataError, DamageList, data_of, text_or_unknown
from orchestrator.store.rows.job_cache import NODE_PREFIX
from orchestrator.store.rows.job_rows import fold_rows

REMEDY = "name a server's home, its database, or a file of `polyfleet server backup`"


def read_log(where: str) -> JobStoreLog:
    """Read the log in a home, database or backup file. Raises UserError if there is none."""
    url = _url(where)
    name = name_of(parse_url(url))
    try:
        with snapshot(url) as connection:
            version_in(connection, name)
            records, unreadable = _records(connection)
            rates = Throughput(_rates(connection))
            return JobStoreLog(name, tuple(records), unreadable, rates, _newest_s(connection))
    except sqlite.DamagedFile as e:
        raise UserError(f"--log: {e.message}", REMEDY) from None


def _url(where: str) -> str:
    if "://" in where:
        return database_setting.strip_password(where)
    path = Path(where)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as e:
        raise UserError(f"--log: {where[:60]} cannot be read: {e.strerror}", REMEDY) from None
    if is_folder:
        ours = path.resolve() == home().resolve()
        return database_setting.database_url(home()) if ours else database_setting.recorded_url(path.absolute())
    if not is_file:
        raise UserError(f"--log: there is no file or folder {where}", REMEDY)
    return sqlite_url(path)


def _records(connection: Connection) -> tuple[list[Record], int]:
    """Return the records of jobs, and the number of jobs with a damaged history."""
    damage, records, unreadable = DamageList(), [], 0
    for job, rows in groupby(_events(connection), key=lambda row: row.job):
        if isinstance(job, str) and job.startswith(NODE_PREFIX):
            continue
        folded = fold_rows(text_or_unknown(job), rows, damage)
        if folded.record is None or folded.damaged:
            unreadable += 1
        else:
            records.append(folded.record)
    return records, unreadable


def _events(connection: Connection) -> Iterator[Row[tuple[object, ...]]]:
    """Events by job, oldest first, without those of jobs that are being removed."""
    query = select(events).order_by(events.c.job, events.c.seq)
    if inspect(connection).has_table(removals.name):
        query = query.where(~exists().where(removals.c.job == events.c.job, removals.c.node == ""))
    yield from connection.execution_options(yield_per=ROWS_AT_ONCE).execute(query)


def _newest_s(connection: Connection) -> float:
    newest = connection.scalar(select(events.c.time).order_by(events.c.seq.desc()).limit(1))
    return float(newest) if isinstance(newest, int | float) and math.isfinite(newest) else 0.0


def _rates(connection: Connection) -> dict[Key, Measured]:
    """The newest measurement for each key. Runs with invalid lines are ignored."""
    newest: dict[Key, Measured] = {}
    query = select(benchmark_lines).order_by(benchmark_lines.c.run, benchmark_lines.c.seq)
    for _, lines in groupby(connection.execute(query), key=lambda row: row.run):
        try:
            rows = list(throughput.rows(_readable(lines)))
        except (KeyError, TypeError, ValueError, ZeroDivisionError, IndexError):
            continue
        for key, measured in rows:
            if key not in newest or newest[key].at_s <= measured.at_s:
                newest[key] = measured
    return newest


def _readable(lines: Iterable[Row[tuple[object, ...]]]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with suppress(DamagedDataError):
            yield data_of(line.data)
