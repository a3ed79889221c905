"""Requests with an idempotency key: asked again, they get the first answer. Those that come together share one look at
the keys, and a transaction.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, bindparam, select

from cluster.errors import Conflict, FleetError, UserError
from orchestrator.core.model import Event
from orchestrator.store.codec import decode, encode
from orchestrator.store.damaged_rows import DamagedDataError, DamagedRow, DamageList, data_of
from orchestrator.store.database import Database
from orchestrator.store.job_cache import EventIgnored
from orchestrator.store.schema import requests
from orchestrator.store.unit_of_work import CommitPending, Stored, UnitOfWork, make_unit, storable
from orchestrator.store.writer import StoreWriter

LONGEST_KEY = 255
LIMIT_S = 20.0
"""No request waits longer for the store than that; a client waits for a minute."""
DRAWS = 5
"""How often new ids are drawn."""

Data = dict[str, Any]
Told = Data | Exception
KNOWN = select(requests).where(requests.c.key.in_(bindparam("keys", expanding=True)))
"""Made once: that takes longer than running it."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """What a request is answered with, and the events that make it true: stored together, or not at all."""

    body: Data
    events: Sequence[Event] = ()
    status: int = 200


@dataclass(frozen=True, slots=True)
class IdempotentRequest:
    """A request. `digest` is of its body; with key "" nothing is remembered. `make` draws the ids of new jobs: it is
    asked again when one of them is taken.
    """

    key: str
    digest: str
    make: Callable[[], StoredResponse]


class IdempotentRequests:
    """Safe to use from many threads: of two requests with one key the second waits until the first is answered, and is
    refused where that takes long. Keys of requests that were told CommitPending are in use until it is known what came
    of them.
    """

    def __init__(self, database: Database, writer: StoreWriter, damage: DamageList):
        self._database, self._writer, self._damage = database, writer, damage
        self._changed = threading.Condition()
        self._in_use: set[str] = set()

    def each(self, asked: Sequence[IdempotentRequest], stored: Stored) -> list[Told]:
        """The answer or the error of each, in order."""
        told: dict[int, Told] = {}
        while left := [n for n in range(len(asked)) if n not in told]:
            first = {asked[n].key or n: n for n in reversed(left)}  # of those with one key the others come after it
            told |= self._each({n: asked[n] for n in sorted(first.values())}, stored)
        return [told[n] for n in range(len(asked))]

    def _each(self, asked: dict[int, IdempotentRequest], stored: Stored) -> dict[int, Told]:
        """By number; no two have the same key."""
        told: dict[int, Told] = {n: error for n, one in asked.items() if (error := _wrong(one.key))}
        keys = {one.key: n for n, one in asked.items() if one.key and n not in told}
        with self._using(keys) as late:
            told |= {keys[row.key]: self._repeated(asked[keys[row.key]], row) for row in self._known(keys)}
            return told | self._answered({n: one for n, one in asked.items() if n not in told}, stored, late)

    @contextmanager
    def _using(self, keys: Collection[str]) -> Iterator[set[str]]:
        """All at once, so that nobody who holds some waits for others. Raises FleetError after LIMIT_S. Those that are
        put into what it yields stay in use (see `_keep`).
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._in_use.isdisjoint(keys), LIMIT_S):
                raise CommitPending(
                    f"a request with the same key has waited for the job store for {LIMIT_S:.0f} s",
                    "ask again: the same key has one effect",
                )
            self._in_use.update(keys)
        late: set[str] = set()
        try:
            yield late
        finally:
            self._free(set(keys) - late)

    def _free(self, keys: Collection[str]) -> None:
        with self._changed:
            self._in_use.difference_update(keys)
            self._changed.notify_all()

    def _keep(self, key: str, unit: UnitOfWork, late: set[str]) -> None:
        """In use until it is done: nobody can look up yet whether that key has an answer."""
        late.add(key)
        unit.done.add_done_callback(lambda _: self._free({key}))

    def _known(self, keys: Collection[str]) -> Sequence[Row[Any]]:
        wanted = [key for key in keys if key not in self._writer.doubtful]
        return self._database.rows(KNOWN, keys=wanted) if wanted else []

    def _repeated(self, asked: IdempotentRequest, known: Row[Any]) -> Told:
        if known.digest != asked.digest:
            return Conflict(f"the idempotency key {asked.key[:40]!r} was used with another request", "use a new key")
        try:
            return data_of(known.body)
        except DamagedDataError as e:
            self._damage.add(DamagedRow("requests", 0, asked.key[:40], "answer", str(e)))
            return FleetError(
                f"the stored answer to the idempotency key {asked.key[:40]!r} is damaged: it {e}",
                "look for its job with `polyfleet jobs`; restore the database from a backup",
            )

    def _answered(self, asked: dict[int, IdempotentRequest], stored: Stored, late: set[str]) -> dict[int, Told]:
        """Made and stored; made again where an id was taken."""
        told: dict[int, Told] = {}
        for left in reversed(range(DRAWS)):
            waiting = {n: one for n, one in asked.items() if n not in told}
            if not waiting:
                break
            drawn = self._drawn(waiting, stored, late)
            told |= {n: one for n, one in drawn.items() if not (left and isinstance(one, EventIgnored))}
        return told

    def _drawn(self, asked: dict[int, IdempotentRequest], stored: Stored, late: set[str]) -> dict[int, Told]:
        told: dict[int, Told] = {}
        units: dict[int, UnitOfWork] = {}
        for n, one in asked.items():
            try:
                told[n], work = _kept(one, one.make(), stored)
            except Exception as e:
                told[n] = e
                continue
            if work.events or work.request:
                units[n] = work
        for n, result in zip(units, self._writer.submit_all(list(units.values()), LIMIT_S), strict=True):
            if isinstance(result, Exception):
                told[n] = result
            if isinstance(result, CommitPending) and asked[n].key:
                self._keep(asked[n].key, units[n], late)
        return told


def _kept(asked: IdempotentRequest, answer: StoredResponse, stored: Stored) -> tuple[Data, UnitOfWork]:
    """(what is told, now and when it is asked again; what is to be stored)"""
    body, work = encode(answer.body), make_unit(answer.events, strict=True)
    work.stored = stored if answer.events else None
    if asked.key:
        kept = {"status": answer.status, "body": body, "time": time.time()}
        work.request = {"key": asked.key, "digest": asked.digest, **kept}
    return decode(body), work


def _wrong(key: str) -> UserError | None:
    """Why that key cannot be kept."""
    try:
        storable("idempotency key", key, LONGEST_KEY)
    except UserError as e:
        return e
    return None
