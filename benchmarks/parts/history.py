"""Jobs that were there before: written into a job store as if they had been submitted, without the waiting.

As a script: `history.py URL ENDED OPEN EVENTS`, events of each job 2 to 10.
"""

import sys
from dataclasses import replace
from itertools import islice

from sqlalchemy import Connection

from orchestrator.core.jobs.fold import apply, submitted
from orchestrator.core.model import Event
from orchestrator.spec.job_spec import parse_job
from orchestrator.store.database.database import insert_rows
from orchestrator.store.database.schema import events, jobs
from orchestrator.store.events.event_store import EventStore
from orchestrator.store.rows import job_rows, record_codec
from orchestrator.store.rows.codec import encode

AT_ONCE = 5000
PLACED = {"candidate": 0, "kind": "cpu", "pool": "cpu", "backend": "cpu", "leases": [["cpu-0/cpu", [0]]], "reason": ""}
SPEC = {"name": "sweep-17", "command": "python train.py --learning-rate 0.000123", "env": {"TRIAL": "123456"}}
ID = "sweep-17-00000000"


def life(count: int, is_open: bool) -> list[Event]:
    """Of one job, of which others are copies with another id and numbers."""
    job = parse_job(SPEC).to_job(ID, 1e9)
    made = [submitted(job, SPEC, 1e9), Event(ID, "placed", 1, 1e9, PLACED), Event(ID, "started", 1, 1e9)]
    notes = [
        Event(ID, "checkpoint", 1, 1e9, {"pool": "cpu", "path": f"{ID}/step-{n}", "step": n, "at": n})
        for n in range(max(0, count - 3 - (not is_open)))
    ]
    made = [*made[: count - (not is_open)], *notes]
    return made if is_open else [*made, Event(ID, "cancelled", made[-1].epoch, 1e9, {"reason": "asked"}),
                                 *([Event(ID, "released", 1, 1e9, {"reason": ""})] if count > 2 else [])]  # fmt: skip


def write(connection: Connection, number: int, first: int, count: int, is_open: bool) -> int:
    """`number` jobs from event `first` on; the next free number."""
    made = life(count, is_open)
    texts = [encode(event.data) for event in made]
    record = None
    for seq, event in enumerate(made, 10**15):
        record = apply(record, replace(event, seq=seq))
    assert record is not None
    row = job_rows.row_values(10**15, record)
    made_rows = ((f"sweep-17-{first + n:08x}", first + n * len(made)) for n in range(number))
    while some := list(islice(made_rows, AT_ONCE)):
        log, table = [], []
        for job, seq in some:
            for offset, (event, text) in enumerate(zip(made, texts, strict=True)):
                log.append({"seq": seq + offset, "time": event.time_s, "job": job, "epoch": event.epoch,
                            "event": event.event, "data": text.replace(ID, job)})  # fmt: skip
            data = row["data"].replace(ID, job)
            for offset in range(len(made)):
                data = data.replace(str(10**15 + offset), str(seq + offset))
            more = {"number": seq, "id": job, "seq": seq + record.seq - 10**15, "data": data}
            table.append(row | more | {"digest": record_codec.checksum(data)})
        insert_rows(connection, events, log)
        insert_rows(connection, jobs, table)
    return first + number * len(made)


def fill(url: str, ended: int, open_: int, each: int) -> None:
    store = EventStore(url)
    store.close()
    with store._database.connect() as connection, connection.begin():  # no server, no waiting, no HTTP
        following = write(connection, ended, 1, each, False) if ended else 1
        if open_:
            write(connection, open_, following, each, True)


if __name__ == "__main__":
    fill(sys.argv[1], *map(int, sys.argv[2:5]))
