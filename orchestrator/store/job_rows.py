"""Rows of `jobs` from the event log: what the rows are checked against, and made from where they cannot be read."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, Row, RowMapping, bindparam, exists, select

from orchestrator.core.fold import Record
from orchestrator.store import record_codec
from orchestrator.store.damaged_rows import DamagedDataError, DamagedRow, DamageList, event_of, readable
from orchestrator.store.job_cache import NODE, apply_event, is_open
from orchestrator.store.schema import events, jobs, long_work, removals

HARMLESS = ("checkpoint", "replicated", "unreplicated", "resumed")
"""A note of a checkpoint may be missing: the pool's folder is looked at anyway."""

AT_ONCE = 200
"""Jobs whose events are read by one query."""

FOLDED = ("version", "digest", "data")
"""Columns that hold the Record itself, beside those by which a row is found."""

Data = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RebuiltJob:
    """What the events of one job make of it. `damaged` is the first reason why that cannot be trusted, or ""."""

    job: str
    number: int
    record: Record | None
    damaged: str


def values(number: int, record: Record, damaged: str = "") -> Data:
    """The row of a job."""
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
    """Rows of `events` of one job, oldest first. A row that cannot be read is added to `damage` and left out, and so is
    the first that has no place in the history; what follows from that is not told.
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
            told = DamagedRow("events", row.seq, readable(row.job), readable(row.event), why)
            damage.add(told)
            is_harmless = row.event in HARMLESS and not why.startswith("cannot")
            damaged = damaged or ("" if is_harmless else str(told))
    return RebuiltJob(job, number, record, damaged)


def fold_jobs(connection: Connection, ids: list[str], damage: DamageList) -> Iterator[RebuiltJob]:
    """Of those jobs, by id. Nodes among them are left out: their events make no record."""
    of_jobs = [job for job in ids if not job.startswith(NODE)]
    wanted = select(events).where(events.c.job.in_(of_jobs)).order_by(events.c.job, events.c.seq)
    for job, rows in groupby(connection.execute(wanted), key=lambda row: row.job):
        yield fold_rows(readable(job), rows, damage)


def fold_all(connection: Connection, damage: DamageList) -> Iterator[RebuiltJob]:
    """Of every job in the log but those being removed, a few at a time."""
    last = ""
    gone = exists().where(removals.c.job == events.c.job, removals.c.node == "")
    while True:
        wanted = select(events.c.job).distinct().where(events.c.job > last, ~gone).order_by(events.c.job)
        ids = [job for job in connection.scalars(wanted.limit(AT_ONCE)) if isinstance(job, str)]
        if not ids:
            return
        yield from fold_jobs(connection, ids, damage)
        last = ids[-1]


def rebuild(connection: Connection, damage: DamageList) -> int:
    """Write every row of `jobs` anew from the log; how many there are."""
    connection.execute(jobs.delete())
    count, waiting = 0, []
    for folded in fold_all(connection, damage):
        if folded.record:
            waiting.append(values(folded.number, folded.record, folded.damaged))
            count += 1
        if len(waiting) >= AT_ONCE:
            connection.execute(jobs.insert(), waiting)
            waiting = []
            long_work.info("reading the jobs anew from the log of events: %s so far", f"{count:,}")
    if waiting:
        connection.execute(jobs.insert(), waiting)
    return count


def rebuild_some(connection: Connection, ids: Iterable[str], damage: DamageList) -> None:
    """Those rows anew; a job without a `submitted` event loses its row."""
    for job in ids:
        connection.execute(jobs.delete().where(jobs.c.id == job))
        for folded in fold_jobs(connection, [job], damage):
            if folded.record:
                connection.execute(jobs.insert(), values(folded.number, folded.record, folded.damaged))


def differences(connection: Connection, damage: DamageList) -> Iterator[str]:
    """What `jobs` says otherwise than the log, a sentence for each job."""
    seen = 0
    mine = select(jobs).where(jobs.c.id == bindparam("id"))
    for folded in fold_all(connection, damage):
        row = connection.execute(mine, {"id": folded.job}).mappings().first()
        if folded.record is None:
            if row is not None:
                yield f"job {folded.job} has a row but no submission in the log"
            continue
        seen += 1
        wanted = values(folded.number, folded.record, folded.damaged)
        if row is None:
            yield f"job {folded.job} has no row"
        elif other := _differing(row, wanted):
            yield f"the row of job {folded.job} differs from its events in {', '.join(other)}"
    without = select(jobs.c.id).where(~exists().where(events.c.job == jobs.c.id)).limit(AT_ONCE)
    for job in connection.scalars(without):
        yield f"job {job} has a row and no events"


def _differing(row: RowMapping, wanted: Data) -> list[str]:
    """Columns. A row of another version is folded from its events when it is read, but what it is found by counts."""
    own = FOLDED if row["version"] != wanted["version"] else ()
    return [name for name in wanted if row[name] != wanted[name] and name not in ("damaged", *own)]


def outdated(connection: Connection, after: int, damage: DamageList) -> tuple[int | None, list[Data]]:
    """Some rows of ended jobs numbered above `after`: the number of the last, None where there are no more, and what
    those of another version would be today. One whose events lead elsewhere is left as it is.
    """
    ended = select(jobs.c.number, jobs.c.id, jobs.c.version).where(~jobs.c.open, jobs.c.number > after)
    rows = connection.execute(ended.order_by(jobs.c.number).limit(AT_ONCE)).all()
    ids = [row.id for row in rows if row.version != record_codec.version()]
    found = [
        values(folded.number, folded.record)
        for folded in (fold_jobs(connection, ids, damage) if ids else ())
        if folded.record and not folded.damaged and not is_open(folded.record)
    ]
    return (rows[-1].number if rows else None), found


__all__ = ["RebuiltJob", "differences", "fold_all", "fold_jobs", "outdated", "rebuild", "rebuild_some", "values"]
