"""Verify a job store or a backup: the database's own check, each row, and the consistency of jobs with events."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, Table, inspect, select
from sqlalchemy.exc import DBAPIError

from orchestrator.store.database import schema, sqlite
from orchestrator.store.database.backup import NOT_COPIED, ROWS_AT_ONCE, snapshot, version_in
from orchestrator.store.database.database import is_sqlite, name_of, parse_url, translate_error
from orchestrator.store.rows import job_rows
from orchestrator.store.rows.damaged_rows import (
    DamagedDataError,
    DamagedRow,
    DamageList,
    data_of,
    event_of,
    text_or_unknown,
)

MAX_FINDINGS = 100
"""Maximum number of findings that are listed; further ones are only counted."""

UNCOUNTED_TABLES = {*NOT_COPIED, schema.identity.name}

Check = Callable[[Connection], Iterable[str]]
CHECKS: list[Check] = [lambda connection: job_rows.differences(connection, DamageList())]
"""Consistency checks of a store of this version. Each yields a sentence for each problem."""

ROW_CHECKS: dict[str, Callable[[Row[Any]], object]] = {
    schema.events.name: event_of,
    schema.requests.name: lambda row: data_of(row.body),
    schema.reports.name: lambda row: data_of(row.data),
    schema.benchmark_lines.name: lambda row: data_of(row.data),
}


@dataclass(slots=True)
class Verification:
    """Result. `rows`: number of rows read of each table with jobs' data. `remedy` is "" if there are no findings."""

    database: str
    version: int
    rows: dict[str, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    more_findings: int = 0
    remedy: str = ""

    def add(self, finding: str) -> None:
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(" ".join(finding.split()))
        else:
            self.more_findings += 1


def verify(url: str) -> Verification:
    """Verify a store, even while a server uses it. UserError if there is none, FleetError if it is unreadable."""
    checked = Verification(name_of(parse_url(url)), 0)
    try:
        with snapshot(url) as connection:
            _check_store(connection, checked, url)
    except sqlite.DamagedFile as e:
        checked.add(e.message)
    if checked.findings:
        checked.remedy = _remedy(url)
    return checked


def _check_store(connection: Connection, checked: Verification, url: str) -> None:
    checked.version = version_in(connection, checked.database)
    if is_sqlite(parse_url(url)):
        for (message,) in connection.exec_driver_sql(f"PRAGMA integrity_check({MAX_FINDINGS})"):
            if message != "ok":
                checked.add(f"SQLite: {message}")
    existing, is_current = set(inspect(connection).get_table_names()), checked.version == schema.VERSION
    for table in schema.metadata.sorted_tables:
        if table.name in existing:
            try:
                _check_table(connection, table, checked)
            except DBAPIError as e:
                checked.add(f"table {table.name}: {translate_error(e, parse_url(url)).message}")
        elif is_current:
            checked.add(f"table {table.name} is missing")
    if is_current and not checked.findings:
        for finding in (finding for check in CHECKS for finding in check(connection)):
            checked.add(finding)


def _check_table(connection: Connection, table: Table, checked: Verification) -> None:
    """Read and check every row. A table of an older version may lack columns; its rows are read but not checked."""
    existing = {column["name"] for column in inspect(connection).get_columns(table.name)}
    columns = [column for column in table.columns if column.name in existing]
    is_complete = len(columns) == len(table.columns)
    count = 0
    for row in connection.execution_options(yield_per=ROWS_AT_ONCE).execute(select(*columns)):
        count += 1
        for finding in _row_findings(table, row) if is_complete else ():
            checked.add(finding)
    if table.name not in UNCOUNTED_TABLES:
        checked.rows[table.name] = count


def _row_findings(table: Table, row: Row[Any]) -> Iterator[str]:
    check = ROW_CHECKS.get(table.name)
    try:
        if check is not None:
            check(row)
    except DamagedDataError as e:
        owner = text_or_unknown(getattr(row, "job", getattr(row, "run", getattr(row, "key", "?"))))
        event = text_or_unknown(getattr(row, "event", getattr(row, "line", table.name)))
        yield str(DamagedRow(table.name, getattr(row, "seq", 0), owner[:40], event, str(e)))


def _remedy(url: str) -> str:
    remedy = (
        "run `polyfleet server stop`, then `polyfleet server restore FILE` with a backup that"
        " `polyfleet server verify FILE` accepts"
    )
    database_url = parse_url(url)
    newest = sqlite.newest_copy(sqlite.file_of(database_url)) if is_sqlite(database_url) else None
    return f"{remedy}; the newest one here is {newest}" if newest else remedy
