"""What a server does costs the same however many jobs have ended: as many statements, and none reads a whole table."""

import re
from contextlib import contextmanager

import sqlalchemy

from orchestrator.core.jobs.fold import submitted
from orchestrator.core.model import Candidate, Event, Job
from orchestrator.core.states import TERMINAL
from orchestrator.store.events.unit_of_work import make_metrics_row
from orchestrator.verbs import jobs

ENDED = 5000
RUN = {"task": "run", "command": "true", "name": "hello"}
WHOLE_TABLE = re.compile(r"SCAN (jobs|events|reports|requests)\b")
MORE = 12
"""Statements of a few more turns: how many the controller needs depends on when the agents answer."""


class Asked:
    """The SQL statements of a while, and which of them read a whole table."""

    def __init__(self):
        self.statements, self.scans = [], []

    def add(self, connection, cursor, statement, parameters, context, is_many):
        if statement.startswith("EXPLAIN"):
            return
        self.statements.append(statement)
        if statement.startswith(("SELECT", "UPDATE", "DELETE")):
            first = parameters[0] if is_many else parameters
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", first)
            self.scans += [(statement, row.detail) for row in plan if WHOLE_TABLE.match(row.detail)]


@contextmanager
def asked(store):
    found, engines = Asked(), (store._database._readers, store._database._writer)
    for engine in engines:
        sqlalchemy.event.listen(engine, "before_cursor_execute", found.add)
    yield found
    for engine in engines:
        sqlalchemy.event.remove(engine, "before_cursor_execute", found.add)


def end_many(store, count):
    """Jobs that were submitted and cancelled, each with a report."""
    for first in range(0, count, 250):
        names = [f"old-{number:05}" for number in range(first, first + 250)]
        events = [submitted(Job(name, "old", "run", (Candidate(("cpu",)),)), {"command": "x"}, 1.0) for name in names]
        store.append([*events, *(Event(name, "cancelled", 0, 2.0, {"reason": "asked"}) for name in names)], strict=True)
        for name in names:
            store.metrics.queue(make_metrics_row(name, 1, 1, 1.0, {"loss": 0.5}))


def one_life(live, wait_for):
    """A job from its submission to its end, with all turns that the controller needs for it."""
    with asked(live.service.store) as found:
        job = live.service.submissions.submit(RUN)["id"]
        record = live.service.jobs_table.get
        wait_for(lambda: record(job).job.state in TERMINAL and record(job).live_attempt is None)
    return found


def one_page(live, before=None):
    with asked(live.service.store) as found:
        assert jobs.list_(live.hub, limit=20, before=before).rows
    return found


def test_a_submission_a_page_and_the_turns_of_a_job_cost_the_same_with_5000_ended_jobs(live, wait_for):
    life, page = one_life(live, wait_for), one_page(live)
    end_many(live.service.store, ENDED)
    wait_for(lambda: live.service.store.metrics.last(f"old-{ENDED - 1:05}"))
    for later in (one_life(live, wait_for), one_life(live, wait_for)):
        assert len(later.statements) <= len(life.statements) + MORE, later.statements
        assert later.scans == []
    for later in (one_page(live), one_page(live, before=100)):
        assert len(later.statements) == len(page.statements) and later.scans == []
