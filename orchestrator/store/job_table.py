"""The table `jobs`: one row per job, so that nothing that is asked of jobs costs more as history grows."""

import gc
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Connection, Select, bindparam, exists, func, select, union_all

from orchestrator.core.fold import Record
from orchestrator.core.states import State
from orchestrator.store import job_rows, record_codec
from orchestrator.store.bulk_insert import insert_rows
from orchestrator.store.damaged_rows import DamagedDataError, DamagedRow, DamageList, data_of, readable
from orchestrator.store.job_cache import Batch, JobCache
from orchestrator.store.schema import LAST, jobs, long_work, removals, reports

if TYPE_CHECKING:
    from orchestrator.store.database import Database

log = logging.getLogger(__name__)

MANY = 100
"""Jobs with one prefix are counted up to here."""

AT_ONCE = 500
"""Ids in one query."""

Data = dict[str, Any]
READ = (jobs.c.number, jobs.c.id, jobs.c.state, jobs.c.seq, jobs.c.version, jobs.c.digest, jobs.c.damaged, jobs.c.data)
METRICS = (
    select(reports.c.data)
    .where(reports.c.job.between(jobs.c.id, jobs.c.id))
    .order_by(reports.c.job.desc(), reports.c.seq.desc())
    .limit(1)
    .scalar_subquery()
    .label("metrics")
)
"""A range in the order of the index. With an equality PostgreSQL may go through all reports from the newest one back,
which is quick for a job that has one and slow for each that has none."""
SOME = select(*READ).where(jobs.c.id.in_(bindparam("ids", expanding=True)))
UPDATE = (
    jobs.update()
    .where(jobs.c.id == bindparam("of"))
    .values({name: bindparam(name) for name in ("state", "open", "ended", "seq", "version", "digest", "data")})
)
FIXED = ("id", "number", "name", "task", "submitted", "damaged")


@dataclass(frozen=True, slots=True)
class JobPage:
    """Jobs, newest last. `before` is what to ask for next, None where there is no more; `metrics` the newest by id."""

    records: list[Record]
    before: int | None
    metrics: dict[str, Data]


class JobTable:
    """What is in `ledger` is newer than its row. `damaged` has the jobs whose history cannot be trusted, and why.
    Rows of events above `acknowledged` may be taken out again: nobody is shown them.
    """

    def __init__(self, database: "Database", ledger: JobCache, damage: DamageList):
        self._database, self._ledger, self._damage = database, ledger, damage
        self.damaged: dict[str, str] = {}
        self.acknowledged = 0

    def open(self) -> list[Record]:
        """All that are open, in the order of submission. Reads no row."""
        return self._ledger.open()

    def load(self, connection: Connection) -> None:
        """Open jobs into memory. A row that cannot be read is made anew from the events, and all rows where there are
        none: a database of an older version has only events.
        """
        if not connection.scalar(select(exists(select(jobs.c.number)))):
            job_rows.rebuild(connection, self._damage)
        wanted = select(*READ).where(jobs.c.open).order_by(jobs.c.number)
        rows = connection.execute(wanted, execution_options={"yield_per": AT_ONCE})
        anew: list[str] = []
        with _without_gc():
            for row in rows:
                record = self._read(row)
                if record is None:
                    anew.append(row.id)
                    continue
                if row.damaged:
                    self.damaged[row.id] = row.damaged
                self._ledger.put((record,))
        if anew:
            self._load_anew(connection, anew)

    def _load_anew(self, connection: Connection, ids: list[str]) -> None:
        """In their place in the order of submission."""
        of = "1 job" if len(ids) == 1 else f"{len(ids):,} jobs"
        long_work.warning("reading %s anew from the log of events: rows are damaged or of another version", of)
        job_rows.rebuild_some(connection, ids, self._damage)
        known = {record.job.id: record for record in self._ledger.open()}
        self._ledger.forget_all()
        self.damaged |= dict.fromkeys(ids, "its row and its events cannot be read")
        wanted = select(*READ).where(jobs.c.open).order_by(jobs.c.number)
        for row in connection.execute(wanted):
            if row.id in known:
                self._ledger.put((known[row.id],))
            elif record := self._read(row):
                self._ledger.put((record,))
        found = select(jobs.c.id, jobs.c.damaged).where(jobs.c.id.in_(bindparam("ids", expanding=True)))
        for chunk in _chunks(ids):
            for job, why in connection.execute(found, {"ids": chunk}):
                self.damaged.pop(job)
                if why:
                    self.damaged[job] = why

    def load_some(self, connection: Connection, ids: list[str]) -> Iterator[Record]:
        """Those of `ids` that have a row."""
        for chunk in _chunks(ids):
            for row in connection.execute(SOME, {"ids": chunk}).all():
                if record := self._record(connection, row):
                    yield record

    def write(self, connection: Connection, turn: Batch) -> None:
        """The rows of a transaction."""
        rows = [(job, job_rows.values(turn.numbers.get(job, 0), record)) for job, record in turn.after.items()]
        if new := [row for job, row in rows if job in turn.numbers]:
            insert_rows(connection, jobs, new)
        if changed := [row for job, row in rows if job not in turn.numbers]:
            self.change(connection, changed)

    def change(self, connection: Connection, rows: list[Data]) -> None:
        """Rows of jobs that have one, as `folding.values` makes them."""
        kept = [{"of": row["id"]} | {k: v for k, v in row.items() if k not in FIXED} for row in rows]
        connection.execute(UPDATE, kept)

    def get(self, job: str) -> Record | None:
        """By its whole id."""
        if record := self._ledger.get(job):
            return record
        if not _storable(job):
            return None
        with self._database.reading() as connection:
            found = [r for r in self.load_some(connection, [job]) if r.seq <= self.acknowledged]
        self._ledger.put_ended(found)
        return found[0] if found else None

    def page(self, states: Iterable[str], name: str, before: int | None, limit: int) -> JobPage:
        """The newest `limit` jobs of those states, or of all, numbered below `before`."""
        top = self.acknowledged + 1 if before is None else min(before, self.acknowledged + 1)
        wanted, states = set(states), set(states) or ({str(s) for s in State} if name else set())
        with self._database.reading() as connection:
            numbers = list(connection.scalars(_numbers(states, name, top, limit + 1))) if limit > 0 else []
            more, numbers = len(numbers) > limit, numbers[:limit]
            newest = select(*READ, METRICS).where(jobs.c.number.in_(numbers)).order_by(jobs.c.number)
            rows = connection.execute(newest).all() if numbers else []
            pairs = [(row, self._ledger.get(row.id) or self._record(connection, row)) for row in rows]
        found = [(row, record) for row, record in pairs if record and _is_in(record, wanted)]
        metrics = {row.id: self._metrics(row) for row, _ in found}
        return JobPage([record for _, record in found], numbers[-1] if more else None, metrics)

    def ids_from(self, prefix: str) -> list[str]:
        """Of jobs whose id begins so, at most `MANY`."""
        wanted = select(jobs.c.id).where(jobs.c.id >= prefix, jobs.c.id <= prefix + LAST).order_by(jobs.c.id)
        if not prefix or not _storable(prefix):
            return []
        with self._database.reading() as connection:
            return list(connection.scalars(wanted.limit(MANY)))

    def naming(self, text: str) -> str:
        """The newest job whose data has `text` in it, "" if there is none. Reads all rows until it is found."""
        wanted = select(jobs.c.id).where(jobs.c.data.contains(text, autoescape=True)).order_by(jobs.c.number.desc())
        with self._database.reading() as connection:
            return connection.scalar(wanted.limit(1)) or ""

    def exists(self, job: str) -> bool:
        with self._database.reading() as connection:
            return connection.scalar(select(jobs.c.number).where(jobs.c.id == job)) is not None

    def newest_ids(self, count: int) -> list[str]:
        with self._database.reading() as connection:
            return list(connection.scalars(select(jobs.c.id).order_by(jobs.c.number.desc()).limit(count)))

    def counts(self) -> dict[str, int]:
        """How many jobs of each state; reads the whole index."""
        with self._database.reading() as connection:
            return {row[0]: row[1] for row in connection.execute(select(jobs.c.state, func.count()).group_by("state"))}

    def is_being_removed(self, job: str) -> bool:
        wanted = select(removals.c.job).where(removals.c.job == job).limit(1)
        with self._database.reading() as connection:
            return _storable(job) and connection.scalar(wanted) is not None

    def distrusted(self, ids: list[str]) -> dict[str, str]:
        """Those of the open jobs `ids` whose events have a row that cannot be used, or do not lead to what is known of
        them, and why.
        """
        found = {}
        with self._database.reading() as connection:
            for folded in job_rows.fold_jobs(connection, ids, self._damage):
                known = self._ledger.get(folded.job)
                same_age = known and folded.record and folded.record.seq == known.seq
                if folded.damaged:
                    found[folded.job] = folded.damaged
                elif (
                    known
                    and same_age
                    and folded.record
                    and record_codec.encode_record(folded.record) != record_codec.encode_record(known)
                ):
                    found[folded.job] = "its events lead to another state than was stored with them"
        return found

    def _record(self, connection: Connection, row: Any) -> Record | None:
        """Of an ended job, or one not in memory; from its events where the row does not tell."""
        if record := self._read(row):
            return record
        for folded in job_rows.fold_jobs(connection, [row.id], self._damage):
            return folded.record
        return None

    def _read(self, row: Any) -> Record | None:
        if row.version != record_codec.version():
            return None
        try:
            record = record_codec.decode_record(row.data, row.digest)
            if record.job.id == row.id and record.seq == row.seq and record.job.state == row.state:
                return record
            raise DamagedDataError("has data of another job or state")
        except DamagedDataError as e:
            self._damage.add(DamagedRow("jobs", row.number, readable(row.id), readable(row.state), str(e)))
            return None

    def _metrics(self, row: Any) -> Data:
        try:
            return data_of(row.metrics) if row.metrics is not None else {}
        except DamagedDataError:
            return {}  # named when the reports themselves are read


def _numbers(states: set[str], name: str, top: int, limit: int) -> Select[Any]:
    """Of jobs, newest first: each state from its own end of the index, so that no state is read past its newest."""
    newest = select(jobs.c.number).where(jobs.c.number < top).order_by(jobs.c.number.desc()).limit(limit)
    if not states:
        return newest
    named = newest.where(_called(name)) if name else newest
    each = [select(named.where(jobs.c.state == state).subquery().c.number) for state in sorted(states)]
    found = union_all(*each).subquery()
    return select(found.c.number).order_by(found.c.number.desc()).limit(limit)


def _called(name: str) -> ColumnElement[bool]:
    """Equal, or matching where it is a pattern of `*` and `?`, which no name has in it."""
    if not {"*", "?"} & set(name):
        return jobs.c.name == name
    pattern = "".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in name)
    return jobs.c.name.regexp_match(f"^{pattern}$")


def _is_in(record: Record, states: set[str]) -> bool:
    return not states or str(record.job.state) in states


def _storable(text: str) -> bool:
    return text.isprintable()


def _chunks(ids: list[str]) -> Iterator[list[str]]:
    return (ids[start : start + AT_ONCE] for start in range(0, len(ids), AT_ONCE))


@contextmanager
def _without_gc() -> Iterator[None]:
    """Nothing that is loaded is garbage: looking for it among 100,000 records takes longer than loading them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
