"""Programs that write to a job store until they are killed or its disk is full."""

SUBMITTER = """
import os, sys, threading
from itertools import count
from orchestrator.core.jobs.fold import submitted
from orchestrator.core.model import Candidate, Event, Job
from orchestrator.store.events.event_store import EventStore
from orchestrator.store.events.idempotency import StoredResponse

store, round_, numbers = EventStore(sys.argv[1]), sys.argv[2], count()

def submit():
    for number in numbers:
        key = f"{round_}-{number}"
        os.write(1, f"asked {key}\\n".encode())
        job = Job(key, "j", "run", (Candidate(("cpu",)),))
        events = [submitted(job, {"command": "true"}, 1.0), Event(key, "cancelled", 0, 1.0)]
        store.idempotent(key, "digest", lambda: StoredResponse({"id": key}, events))
        os.write(1, f"acked {key}\\n".encode())

for _ in range(8):
    threading.Thread(target=submit, daemon=True).start()
threading.Event().wait()
"""

FILLER = """
import json, resource, sys
from cluster.errors import FleetError
from orchestrator.core.jobs.fold import submitted
from orchestrator.core.model import Candidate, Event, Job
from orchestrator.store.events.event_store import EventStore
from orchestrator.store.events.idempotency import StoredResponse

url, limit, ballast, with_keys = sys.argv[1], int(sys.argv[2]), sys.argv[3], len(sys.argv) > 4
store, acked, refused = EventStore(url), [], []

def append(number):
    job = Job(f"j{number}", "j", "run", (Candidate(("cpu",)),))
    events = [submitted(job, {"pad": "p" * 4000}, 1.0), Event(job.id, "cancelled", 0, 1.0)]
    try:
        if with_keys:
            store.idempotent(f"key-{number}", "digest", lambda: StoredResponse({}, events))
        else:
            store.append(events)
        acked.append(number)
    except FleetError as e:
        refused.append((number, str(e)))

if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
for number in range(2000):
    append(number)
    if len(refused) == 5:
        break
full = len(acked)
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
if ballast:
    open(ballast, "w").close()
for number in [number for number, _ in refused] + list(range(5000, 5005)):
    append(number)
stored = [[e.job, e.event] for e in store.read(0)]
seqs = [e.seq for e in store.read(0)]
differences = store.differences()
store.close()
told = {"acked": acked, "refused": refused, "full": full, "stored": stored, "seqs": seqs}
print(json.dumps(told | {"differences": differences}))
"""


KILLED_BEFORE_A_STATEMENT = """
@event.listens_for(store._database._writer, "before_cursor_execute")
def counted(connection, cursor, statement, *_):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), 9)
"""
"""For a program with `store` and `left`: it is killed when so many statements have been written."""

COMMITTER = (
    """
import os, sys
from orchestrator.core.jobs.fold import submitted
from orchestrator.core.model import Candidate, Event, Job
from orchestrator.runtime.jobs.jobs import Jobs
from orchestrator.store.events.event_store import EventStore
from sqlalchemy import event

store, left = EventStore(sys.argv[1]), int(sys.argv[2])
jobs = Jobs(store)
placed = {"candidate": 0, "kind": "cpu", "pool": "cpu", "leases": [["cpu-0/cpu", [0]]], "reason": "fits"}

"""
    + KILLED_BEFORE_A_STATEMENT
    + """
new = [Job(f"j{n}", "j", "run", (Candidate(("cpu",)),)) for n in range(3)]
jobs.commit([submitted(job, {}, 1.0) for job in new])
jobs.commit([e for j in new for e in (Event(j.id, "placed", 1, 2.0, placed), Event(j.id, "started", 1, 3.0))])
os.write(1, b"acked")
"""
)
