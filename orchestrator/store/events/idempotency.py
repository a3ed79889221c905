"""Requests with an idempotency key: a repeated request gets the stored response of the first one. Concurrent requests
share one query of the keys and one transaction.
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
from orchestrator.store.database.database import Database
from orchestrator.store.database.schema import requests
from orchestrator.store.events.unit_of_work import CommitPending, Stored, UnitOfWork, check_storable, make_unit
from orchestrator.store.events.writer import StoreWriter
from orchestrator.store.rows.codec import decode, encode
from orchestrator.store.rows.damaged_rows import DamagedDataError, DamagedRow, DamageList, data_of
from orchestrator.store.rows.job_cache import InvalidEvent

MAX_KEY_LENGTH = 255
MAX_WAIT_S = 20.0
"""Maximum seconds that a request waits for the store, or for another one with its key; clients wait for 60 s."""
MAX_DRAWS = 5
"""Maximum attempts to generate new ids."""

Data = dict[str, Any]
Outcome = Data | Exception
KEYS_QUERY = select(requests).where(requests.c.key.in_(bindparam("keys", expanding=True)))
"""Built once, because building it takes longer than running it."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Response to a request and the events that belong to it: both are stored, or neither."""

    body: Data
    events: Sequence[Event] = ()
    status: int = 200


@dataclass(frozen=True, slots=True)
class IdempotentRequest:
    """A request. `digest` is that of its body; with key "" its response is not stored. `make` generates the ids of new
    jobs: it is called again if one of them is in use.
    """

    key: str
    digest: str
    make: Callable[[], StoredResponse]


class IdempotentRequests:
    """Processes idempotent requests. Thread-safe: a request whose key is in use waits for the first one, at most
    MAX_WAIT_S, then gets CommitPending. Keys of requests that got CommitPending stay in use until their outcome is
    final.
    """

    def __init__(self, database: Database, writer: StoreWriter, damage: DamageList):
        self._database, self._writer, self._damage = database, writer, damage
        self._changed = threading.Condition()
        self._in_use: set[str] = set()

    def process(self, batch: Sequence[IdempotentRequest], stored: Stored) -> list[Outcome]:
        """Return the response or the error of each request, in order."""
        results: dict[int, Outcome] = {}
        while remaining := [n for n in range(len(batch)) if n not in results]:
            # Of requests with the same key only the first is in this round; the others follow in later rounds.
            first = {batch[n].key or n: n for n in reversed(remaining)}
            results |= self._process({n: batch[n] for n in sorted(first.values())}, stored)
        return [results[n] for n in range(len(batch))]

    def _process(self, batch: dict[int, IdempotentRequest], stored: Stored) -> dict[int, Outcome]:
        """Process requests with different keys, by index."""
        results: dict[int, Outcome] = {n: error for n, one in batch.items() if (error := _key_error(one.key))}
        keys = {one.key: n for n, one in batch.items() if one.key and n not in results}
        with self._reserve_keys(keys) as (reserved, late):
            results |= {keys.pop(key): _in_use_error() for key in keys.keys() - reserved}
            results |= {
                keys[row.key]: self._stored_outcome(batch[keys[row.key]], row) for row in self._stored_rows(keys)
            }
            return results | self._process_new({n: one for n, one in batch.items() if n not in results}, stored, late)

    @contextmanager
    def _reserve_keys(self, keys: Collection[str]) -> Iterator[tuple[set[str], set[str]]]:
        """Reserve all keys at once, so that no thread waits for keys while it holds others; after MAX_WAIT_S those that
        are free. Yield the reserved keys and an empty set: keys that are added to it stay in use afterwards (see
        `_keep_reserved`).
        """
        with self._changed:
            self._changed.wait_for(lambda: self._in_use.isdisjoint(keys), MAX_WAIT_S)
            reserved = set(keys) - self._in_use
            self._in_use.update(reserved)
        late: set[str] = set()
        try:
            yield reserved, late
        finally:
            self._free(reserved - late)

    def _free(self, keys: Collection[str]) -> None:
        with self._changed:
            self._in_use.difference_update(keys)
            self._changed.notify_all()

    def _keep_reserved(self, key: str, unit: UnitOfWork, late: set[str]) -> None:
        """Keep the key in use until the unit is done: until then the response cannot be looked up."""
        late.add(key)
        unit.done.add_done_callback(lambda _: self._free({key}))

    def _stored_rows(self, keys: Collection[str]) -> Sequence[Row[Any]]:
        certain = [key for key in keys if key not in self._writer.doubtful]
        return self._database.rows(KEYS_QUERY, keys=certain) if certain else []

    def _stored_outcome(self, request: IdempotentRequest, row: Row[Any]) -> Outcome:
        if row.digest != request.digest:
            return Conflict(f"the idempotency key {request.key[:40]!r} was used with another request", "use a new key")
        try:
            return data_of(row.body)
        except DamagedDataError as e:
            self._damage.add(DamagedRow("requests", 0, request.key[:40], "answer", str(e)))
            return FleetError(
                f"the stored response for the idempotency key {request.key[:40]!r} is damaged: it {e}",
                "find its job with `polyfleet jobs`, and restore the database from a backup",
            )

    def _process_new(self, batch: dict[int, IdempotentRequest], stored: Stored, late: set[str]) -> dict[int, Outcome]:
        """Make and store responses; make one again if an id was in use."""
        results: dict[int, Outcome] = {}
        for tries_left in reversed(range(MAX_DRAWS)):
            waiting = {n: one for n, one in batch.items() if n not in results}
            if not waiting:
                break
            outcomes = self._try_new(waiting, stored, late)
            results |= {n: one for n, one in outcomes.items() if not (tries_left and isinstance(one, InvalidEvent))}
        return results

    def _try_new(self, batch: dict[int, IdempotentRequest], stored: Stored, late: set[str]) -> dict[int, Outcome]:
        results: dict[int, Outcome] = {}
        units: dict[int, UnitOfWork] = {}
        for n, one in batch.items():
            try:
                results[n], unit = _make_unit(one, one.make(), stored)
            except Exception as e:
                results[n] = e
                continue
            if unit.events or unit.request:
                units[n] = unit
        for n, result in zip(units, self._writer.submit_all(list(units.values()), MAX_WAIT_S), strict=True):
            if isinstance(result, Exception):
                results[n] = result
            if isinstance(result, CommitPending) and batch[n].key:
                self._keep_reserved(batch[n].key, units[n], late)
        return results


def _make_unit(request: IdempotentRequest, response: StoredResponse, stored: Stored) -> tuple[Data, UnitOfWork]:
    """(response body, the same now and when the request is repeated; unit of work to store)"""
    body, unit = encode(response.body), make_unit(response.events, strict=True)
    unit.stored = stored if response.events else None
    if request.key:
        fields = {"status": response.status, "body": body, "time": time.time()}
        unit.request = {"key": request.key, "digest": request.digest, **fields}
    return decode(body), unit


def _in_use_error() -> CommitPending:
    return CommitPending(
        f"the first request with this key has not ended after {MAX_WAIT_S:.0f} s",
        "retry with the same key: the request then counts once",
    )


def _key_error(key: str) -> UserError | None:
    """Error if the key cannot be stored, else None."""
    try:
        check_storable("idempotency key", key, MAX_KEY_LENGTH)
    except UserError as e:
        return e
    return None
