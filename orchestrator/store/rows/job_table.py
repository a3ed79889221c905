"""The table `jobs`: one row per job, so that queries of jobs do not become slower as the history grows."""

import gc
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Integer, Select, bindparam, exists, func, select, union_all

from orchestrator.core.jobs.fold import Record
from orchestrator.core.states import State
from orchestrator.store.database.database import Database, insert_rows
from orchestrator.store.database.schema import LAST_CHARACTER, jobs, removals, reports, startup_log
from orchestrator.store.rows import job_rows, record_codec
from orchestrator.store.rows.damaged_rows import DamagedDataError, DamagedRow, DamageList, data_of, text_or_unknown
from orchestrator.store.rows.job_cache import Batch, JobCache

log = logging.getLogger(__name__)

MAX_PREFIX_MATCHES = 100
"""Maximum number of jobs with one prefix that are counted."""

IDS_PER_QUERY = 500
"""Maximum number of ids in one query."""

Data = dict[str, Any]
RECORD_COLUMNS = (
    jobs.c.number,
    jobs.c.id,
    jobs.c.state,
    jobs.c.seq,
    jobs.c.version,
    jobs.c.digest,
    jobs.c.damaged,
    jobs.c.data,
)
METRICS = (
    select(reports.c.data)
    .where(reports.c.job.between(jobs.c.id, jobs.c.id))
    .order_by(reports.c.job.desc(), reports.c.seq.desc())
    .limit(1)
    .scalar_subquery()
    .label("metrics")
)
"""A range in the order of the index. With an equality, PostgreSQL may scan all reports from the newest one back, which
is fast for a job with reports and slow for each job without."""
PAGE_QUERY = (
    select(*RECORD_COLUMNS, METRICS)
    .where(jobs.c.number.in_(bindparam("numbers", expanding=True)))
    .order_by(jobs.c.number)
)
"""Built once, because building it takes longer than running it."""
BY_IDS_QUERY = select(*RECORD_COLUMNS).where(jobs.c.id.in_(bindparam("ids", expanding=True)))
UPDATE_QUERY = (
    jobs.update()
    .where(jobs.c.id == bindparam("of"))
    .values({name: bindparam(name) for name in ("name", "state", "open", "ended", "seq", "version", "digest", "data")})
)
FIXED_COLUMNS = ("id", "number", "task", "submitted", "damaged")


@dataclass(frozen=True, slots=True)
class JobPage:
    """Jobs, newest last. `before`: number for the next page, None if there is none. `metrics`: newest by job id."""

    records: list[Record]
    before: int | None
    metrics: dict[str, Data]


class JobTable:
    """The table of jobs. Records in `ledger` are newer than their rows. `damaged` has the jobs whose history cannot be
    trusted, with the reason. Rows of events above `acknowledged` may still be removed, so readers do not get them.
    """

    def __init__(self, database: Database, ledger: JobCache, damage: DamageList):
        self._database, self._cache, self._damage = database, ledger, damage
        self.damaged: dict[str, str] = {}
        self.acknowledged = 0

    def open(self) -> list[Record]:
        """All open jobs in the order of submission. Reads no row."""
        return self._cache.open()

    def load(self, connection: Connection) -> None:
        """Load open jobs into memory. A row that cannot be read is rebuilt from its events; so are all rows if there
        are none, because a migration may delete them.
        """
        if not connection.scalar(select(exists(select(jobs.c.number)))):
            job_rows.rebuild(connection, self._damage)
        query = select(*RECORD_COLUMNS).where(jobs.c.open).order_by(jobs.c.number)
        rows = connection.execute(query, execution_options={"yield_per": IDS_PER_QUERY})
        unreadable: list[str] = []
        with _without_gc():
            for row in rows:
                record = self._read(row)
                if record is None:
                    unreadable.append(row.id)
                    continue
                if row.damaged:
                    self.damaged[row.id] = row.damaged
                self._cache.put((record,))
        if unreadable:
            self._load_rebuilt(connection, unreadable)

    def _load_rebuilt(self, connection: Connection, ids: list[str]) -> None:
        """Rebuild rows and load them, keeping the order of submission."""
        job_count = "1 job" if len(ids) == 1 else f"{len(ids):,} jobs"
        startup_log.warning("rebuilding %s from the log of events: rows are damaged or of another version", job_count)
        job_rows.rebuild_some(connection, ids, self._damage)
        records = {record.job.id: record for record in self._cache.open()}
        self._cache.clear_open()
        self.damaged |= dict.fromkeys(ids, "its row and its events cannot be read")
        query = select(*RECORD_COLUMNS).where(jobs.c.open).order_by(jobs.c.number)
        for row in connection.execute(query):
            if row.id in records:
                self._cache.put((records[row.id],))
            elif record := self._read(row):
                self._cache.put((record,))
        damage_query = select(jobs.c.id, jobs.c.damaged).where(jobs.c.id.in_(bindparam("ids", expanding=True)))
        for chunk in _chunks(ids):
            for job, why in connection.execute(damage_query, {"ids": chunk}):
                self.damaged.pop(job)
                if why:
                    self.damaged[job] = why

    def load_some(self, connection: Connection, ids: list[str]) -> Iterator[Record]:
        """Yield the records of those `ids` that have a row."""
        for chunk in _chunks(ids):
            for row in connection.execute(BY_IDS_QUERY, {"ids": chunk}).all():
                if record := self._record(connection, row):
                    yield record

    def write(self, connection: Connection, turn: Batch) -> None:
        """Write the rows of a transaction."""
        rows = [(job, job_rows.row_values(turn.numbers.get(job, 0), record)) for job, record in turn.after.items()]
        if new := [row for job, row in rows if job in turn.numbers]:
            insert_rows(connection, jobs, new)
        if changed := [row for job, row in rows if job not in turn.numbers]:
            self.change(connection, changed)

    def change(self, connection: Connection, rows: list[Data]) -> None:
        """Update existing rows; `rows` are made by `job_rows.row_values`."""
        parameters = [{"of": row["id"]} | {k: v for k, v in row.items() if k not in FIXED_COLUMNS} for row in rows]
        connection.execute(UPDATE_QUERY, parameters)

    def get(self, job: str) -> Record | None:
        """Record of a job by its full id."""
        if record := self._cache.get(job):
            return record
        if not _storable(job):
            return None
        with self._database.reading() as connection:
            records = [r for r in self.load_some(connection, [job]) if r.seq <= self.acknowledged]
        self._cache.put_ended(records)
        return records[0] if records else None

    def page(self, states: Iterable[str], name: str, before: int | None, limit: int) -> JobPage:
        """The newest `limit` jobs of those states, or of all states, numbered below `before`."""
        top = self.acknowledged + 1 if before is None else min(before, self.acknowledged + 1)
        requested_states, states = set(states), set(states) or ({str(s) for s in State} if name else set())
        with self._database.reading() as connection:
            query = _numbers_query(frozenset(states), _name_match(name))
            values = {"top": top, "most": limit + 1} | ({"name": _name_value(name)} if name else {})
            numbers = list(connection.scalars(query, values)) if limit > 0 else []
            more, numbers = len(numbers) > limit, numbers[:limit]
            rows = connection.execute(PAGE_QUERY, {"numbers": numbers}).all() if numbers else []
            pairs = [(row, self._cache.get(row.id) or self._record(connection, row)) for row in rows]
        chosen = [(row, record) for row, record in pairs if record and _is_in(record, requested_states)]
        metrics = {row.id: self._metrics(row) for row, _ in chosen}
        return JobPage([record for _, record in chosen], numbers[-1] if more else None, metrics)

    def ids_with_prefix(self, prefix: str) -> list[str]:
        """Ids of jobs with that prefix, at most `MAX_PREFIX_MATCHES`."""
        query = select(jobs.c.id).where(jobs.c.id >= prefix, jobs.c.id <= prefix + LAST_CHARACTER).order_by(jobs.c.id)
        if not prefix or not _storable(prefix):
            return []
        with self._database.reading() as connection:
            return list(connection.scalars(query.limit(MAX_PREFIX_MATCHES)))

    def newest_containing(self, text: str) -> str:
        """Id of the newest job whose data contains `text`, "" if there is none. Reads rows until the first match."""
        query = select(jobs.c.id).where(jobs.c.data.contains(text, autoescape=True)).order_by(jobs.c.number.desc())
        with self._database.reading() as connection:
            return connection.scalar(query.limit(1)) or ""

    def exists(self, job: str) -> bool:
        with self._database.reading() as connection:
            return connection.scalar(select(jobs.c.number).where(jobs.c.id == job)) is not None

    def newest_ids(self, count: int) -> list[str]:
        with self._database.reading() as connection:
            return list(connection.scalars(select(jobs.c.id).order_by(jobs.c.number.desc()).limit(count)))

    def counts(self) -> dict[str, int]:
        """Number of jobs in each state; reads the complete index."""
        with self._database.reading() as connection:
            return {row[0]: row[1] for row in connection.execute(select(jobs.c.state, func.count()).group_by("state"))}

    def is_being_removed(self, job: str) -> bool:
        query = select(removals.c.job).where(removals.c.job == job).limit(1)
        with self._database.reading() as connection:
            return _storable(job) and connection.scalar(query) is not None

    def damaged_histories(self, ids: list[str]) -> dict[str, str]:
        """Open jobs of `ids` whose events have an unusable row or do not lead to the cached record, with the reason."""
        reasons = {}
        with self._database.reading() as connection:
            for folded in job_rows.fold_jobs(connection, ids, self._damage):
                cached = self._cache.get(folded.job)
                same_age = cached and folded.record and folded.record.seq == cached.seq
                if folded.damaged:
                    reasons[folded.job] = folded.damaged
                elif (
                    cached
                    and same_age
                    and folded.record
                    and record_codec.encode_record(folded.record) != record_codec.encode_record(cached)
                ):
                    reasons[folded.job] = "its events lead to another state than the stored one"
        return reasons

    def _record(self, connection: Connection, row: Any) -> Record | None:
        """Record of a job that is not in memory, from its row, or from its events if the row is unreadable."""
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
            self._damage.add(
                DamagedRow("jobs", row.number, text_or_unknown(row.id), text_or_unknown(row.state), str(e))
            )
            return None

    def _metrics(self, row: Any) -> Data:
        try:
            return data_of(row.metrics) if row.metrics is not None else {}
        except DamagedDataError:
            return {}  # recorded as damage when the rows themselves are read


@lru_cache
def _numbers_query(states: frozenset[str], match: str) -> Select[Any]:
    """Query for numbers of jobs, newest first; `match` as in `_name_match`. Built once, because building it takes
    longer than running it. It reads each state from its end of the index, so that it does not read older jobs of any
    state than it needs.
    """
    most = bindparam("most", type_=Integer)
    newest = select(jobs.c.number).where(jobs.c.number < bindparam("top")).order_by(jobs.c.number.desc()).limit(most)
    if not states:
        return newest
    named = {"equal": jobs.c.name == bindparam("name"), "pattern": jobs.c.name.regexp_match(bindparam("name"))}
    candidates = newest.where(named[match]) if match else newest
    each = [select(candidates.where(jobs.c.state == state).subquery().c.number) for state in sorted(states)]
    matching = union_all(*each).subquery()
    return select(matching.c.number).order_by(matching.c.number.desc()).limit(most)


def _name_match(name: str) -> str:
    """How a name is compared: "" not at all, "equal", or "pattern" if it has `*` or `?`, which names never contain."""
    if not name:
        return ""
    return "pattern" if {"*", "?"} & set(name) else "equal"


def _name_value(name: str) -> str:
    """The value that names are compared with: of a pattern, its regular expression."""
    if _name_match(name) == "equal":
        return name
    pattern = "".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in name)
    return f"^{pattern}$"


def _is_in(record: Record, states: set[str]) -> bool:
    return not states or str(record.job.state) in states


def _storable(text: str) -> bool:
    return text.isprintable()


def _chunks(ids: list[str]) -> Iterator[list[str]]:
    return (ids[start : start + IDS_PER_QUERY] for start in range(0, len(ids), IDS_PER_QUERY))


@contextmanager
def _without_gc() -> Iterator[None]:
    """Disable garbage collection: loaded records are not garbage, and searching 100,000 of them takes longer than
    loading them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
