"""Build rows of `jobs` from the event log, to check existing rows or to replace unreadable ones."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, Row, RowMapping, bindparam, exists, select

from orchestrator.core.jobs.fold import Record
from orchestrator.store.database.schema import events, jobs, removals, startup_log
from orchestrator.store.rows import record_codec
from orchestrator.store.rows.damaged_rows import DamagedDataError, DamagedRow, DamageList, event_of, text_or_unknown
from orchestrator.store.rows.job_cache import NODE_PREFIX, apply_event, is_open

HARMLESS_EVENTS = ("checkpoint", "replicated", "unreplicated", "resumed")
"""Events that may be missing: they are about checkpoints, and the pool's folder is read anyway."""

JOBS_PER_QUERY = 200
"""Number of jobs whose events one query reads."""

RECORD_COLUMNS = ("version", "digest", "data")
"""Columns with the Record itself; the others serve to look up a row."""

Data = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RebuiltJob:
    """State of a job according to its events. `damaged` is the first reason why it cannot be trusted, or ""."""

    job: str
    number: int
    record: Record | None
    damaged: str


def row_values(number: int, record: Record, damaged: str = "") -> Data:
    """Row of a job."""
    job, data = record.job, record_codec.encode_record(record)
    return {
        "number": number,
        "id": job.id,
        "name": job.name,
        "task": job.task,
        "state": str(job.state),
        "open": is_open(record),
        "submitted": job.submitted_s,
        "ended": record.ended_s,
        "seq": record.seq,
        "damaged": damaged,
        "version": record_codec.version(),
        "digest": record_codec.checksum(data),
        "data": data,
    }


def fold_rows(job: str, rows: Iterable[Row[Any]], damage: DamageList) -> RebuiltJob:
    """Build a job from its rows of `events`, oldest first. An unreadable row is left out and added to `damage`; so is
    the first invalid event. Later invalid events, which may be consequences of it, are not reported.
    """
    record, number, damaged = None, 0, ""
    for row in rows:
        try:
            event = event_of(row)
            why, record = apply_event(record, event)
            why = f"cannot be used: {why}" if why and not damaged else ""
            number = number or (row.seq if record else 0)
        except DamagedDataError as e:
            why = str(e)
        if why:
            damaged_row = DamagedRow("events", row.seq, text_or_unknown(row.job), text_or_unknown(row.event), why)
            damage.add(damaged_row)
            is_harmless = row.event in HARMLESS_EVENTS and not why.startswith("cannot")
            damaged = damaged or ("" if is_harmless else str(damaged_row))
    return RebuiltJob(job, number, record, damaged)


def fold_jobs(connection: Connection, ids: list[str], damage: DamageList) -> Iterator[RebuiltJob]:
    """Build jobs by id. Ids of nodes are skipped: their events have no record."""
    of_jobs = [job for job in ids if not job.startswith(NODE_PREFIX)]
    query = select(events).where(events.c.job.in_(of_jobs)).order_by(events.c.job, events.c.seq)
    for job, rows in groupby(connection.execute(query), key=lambda row: row.job):
        yield fold_rows(text_or_unknown(job), rows, damage)


def fold_all(connection: Connection, damage: DamageList) -> Iterator[RebuiltJob]:
    """Build every job in the log, except those being removed, JOBS_PER_QUERY at a time."""
    last = ""
    is_removed = exists().where(removals.c.job == events.c.job, removals.c.node == "")
    while True:
        query = select(events.c.job).distinct().where(events.c.job > last, ~is_removed).order_by(events.c.job)
        ids = [job for job in connection.scalars(query.limit(JOBS_PER_QUERY)) if isinstance(job, str)]
        if not ids:
            return
        yield from fold_jobs(connection, ids, damage)
        last = ids[-1]


def rebuild(connection: Connection, damage: DamageList) -> int:
    """Rebuild all rows of `jobs` from the log; return their number."""
    connection.execute(jobs.delete())
    count, waiting = 0, []
    for folded in fold_all(connection, damage):
        if folded.record:
            waiting.append(row_values(folded.number, folded.record, folded.damaged))
            count += 1
        if len(waiting) >= JOBS_PER_QUERY:
            connection.execute(jobs.insert(), waiting)
            waiting = []
            startup_log.info("rebuilding the table of jobs from the log of events: %s jobs so far", f"{count:,}")
    if waiting:
        connection.execute(jobs.insert(), waiting)
    return count


def rebuild_some(connection: Connection, ids: Iterable[str], damage: DamageList) -> None:
    """Rebuild the rows of these jobs; a job without a `submitted` event loses its row."""
    for job in ids:
        connection.execute(jobs.delete().where(jobs.c.id == job))
        for folded in fold_jobs(connection, [job], damage):
            if folded.record:
                connection.execute(jobs.insert(), row_values(folded.number, folded.record, folded.damaged))


def differences(connection: Connection, damage: DamageList) -> Iterator[str]:
    """Yield a sentence for each job whose row differs from the log."""
    checked_count = 0
    row_of_job = select(jobs).where(jobs.c.id == bindparam("id"))
    for folded in fold_all(connection, damage):
        row = connection.execute(row_of_job, {"id": folded.job}).mappings().first()
        if folded.record is None:
            if row is not None:
                yield f"job {folded.job} has a row but no submission in the log"
            continue
        checked_count += 1
        expected = row_values(folded.number, folded.record, folded.damaged)
        if row is None:
            yield f"job {folded.job} has no row"
        elif other := _differing_columns(row, expected):
            yield f"the row of job {folded.job} differs from its events in {', '.join(other)}"
    without = select(jobs.c.id).where(~exists().where(events.c.job == jobs.c.id)).limit(JOBS_PER_QUERY)
    for job in connection.scalars(without):
        yield f"job {job} has a row and no events"


def _differing_columns(row: RowMapping, expected: Data) -> list[str]:
    """Names of columns that differ. In a row of another version only lookup columns count: reading it rebuilds the
    rest.
    """
    ignored_columns = RECORD_COLUMNS if row["version"] != expected["version"] else ()
    return [name for name in expected if row[name] != expected[name] and name not in ("damaged", *ignored_columns)]


def outdated(connection: Connection, after: int, damage: DamageList) -> tuple[int | None, list[Data]]:
    """Check some rows of ended jobs numbered above `after`. Return the number of the last one, None if there are no
    more, and new rows for those of another version. A row whose events do not lead to an ended job is left unchanged.
    """
    ended = select(jobs.c.number, jobs.c.id, jobs.c.version).where(~jobs.c.open, jobs.c.number > after)
    rows = connection.execute(ended.order_by(jobs.c.number).limit(JOBS_PER_QUERY)).all()
    ids = [row.id for row in rows if row.version != record_codec.version()]
    rebuilt = [
        row_values(folded.number, folded.record)
        for folded in (fold_jobs(connection, ids, damage) if ids else ())
        if folded.record and not folded.damaged and not is_open(folded.record)
    ]
    return (rows[-1].number if rows else None), rebuilt


__all__ = ["RebuiltJob", "differences", "fold_all", "fold_jobs", "outdated", "rebuild", "rebuild_some", "row_values"]
