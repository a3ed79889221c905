"""What only PostgreSQL can show: other servers, lost connections, restarts, locks. test_events.py runs on it too."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sqlalchemy
from store_submitters import Submitters, check_stored, life

from cluster.errors import FleetError, UserError
from orchestrator.core.model import Event
from orchestrator.runtime.jobs.jobs import Jobs, StoreUnavailable
from orchestrator.services.submissions import Submissions
from orchestrator.store.database import database
from orchestrator.store.events.event_store import EventStore

ROOT = Path(__file__).parents[3]
EVENT = Event("j", "started", 1, 1.0)
OURS = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'polyfleet%'"
HOLDER = f"{OURS} AND application_name LIKE 'polyfleet on %'"
KILL_OURS = OURS.replace("SELECT pid", "SELECT pg_terminate_backend(pid, 5000)")
KILL_HOLDER = HOLDER.replace("SELECT pid", "SELECT pg_terminate_backend(pid, 5000)")


@pytest.fixture
def url(postgresql_url):
    return postgresql_url


def test_a_second_server_is_kept_out_and_told_who_has_the_database(open_store, url):
    first = open_store()
    with pytest.raises(
        FleetError, match=r"another server has postgresql://.* open: polyfleet on .*, process \d+ since"
    ):
        open_store()
    assert first.append([EVENT]) == [1]
    first.close()
    assert open_store().append([EVENT]) == [2]


def test_a_killed_server_leaves_no_lock(url, open_store, wait_for):
    code = "import os; from orchestrator.store.events.event_store import EventStore;"
    code += f"EventStore({url!r}); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code], check=False)

    def opened():
        try:
            return open_store().append([EVENT]) == [1]
        except FleetError as e:
            assert "another server has" in str(e)
            return False

    wait_for(opened)


def test_who_lost_the_lock_to_another_writes_no_more(open_store, postgresql, url):
    first = open_store()
    first.append([EVENT])
    postgresql.sql(url, KILL_HOLDER)
    second = open_store()
    assert second.append([EVENT]) == [2]
    for _ in range(2):
        with pytest.raises(FleetError, match="another server has"):
            first.append([EVENT])
    second.close()
    with pytest.raises(FleetError, match="another server has taken over"):
        first.append([EVENT])
    assert [e.seq for e in first.read(0)] == [1]


@pytest.mark.usefixtures("patient_store")
def test_who_lost_its_sessions_to_nobody_takes_the_lock_again(store, open_store, postgresql, url):
    store.append([EVENT])
    postgresql.sql(url, KILL_OURS)
    assert store.append([EVENT]) == [2]
    assert len(postgresql.sql(url, HOLDER)) == 1
    with pytest.raises(FleetError, match="another server has"):
        open_store()
    assert [e.seq for e in store.read(0)] == [1, 2]


def test_two_schemas_of_a_database_are_two_stores(open_at, postgresql, url):
    postgresql.sql(url, "CREATE SCHEMA other")
    first, second = open_at(url), open_at(f"{url}&options=-csearch_path%3Dother")
    first.append([EVENT])
    assert second.append([EVENT, EVENT]) == [1, 2]
    assert len(first.read(0)) == 1 and first.identity != second.identity


@pytest.mark.usefixtures("patient_store")
def test_connections_killed_during_commits_lose_and_double_nothing(store, postgresql, url, wait_for, request):
    submitters = Submitters(store)
    request.addfinalizer(submitters.ended)
    for killed in range(1, 13):
        wait_for(lambda killed=killed: len(submitters.acked) > 20 * killed)
        postgresql.sql(url, KILL_OURS)
    wait_for(lambda: len(submitters.acked) > 300)
    done = submitters.ended()
    assert done.refused == []
    check_stored(store, done.acked)


def test_a_restart_during_commits_loses_and_doubles_nothing(open_store, postgresql, url, wait_for, request):
    store = open_store()
    submitters = Submitters(store)
    request.addfinalizer(submitters.ended)
    for restarted in (1, 2):
        wait_for(lambda restarted=restarted: len(submitters.acked) > 50 * restarted)
        postgresql.restart()
    before = len(submitters.acked)
    wait_for(lambda: len(submitters.acked) > before + 50)
    done = submitters.ended()
    check_stored(store, done.acked, done.refused)
    store.close()
    check_stored(open_store(), done.acked, done.refused)


def test_a_submission_whose_key_cannot_be_looked_up_is_told_when_to_come_back(
    open_store, postgresql, monkeypatch, request
):
    monkeypatch.setattr(database, "RECONNECT_S", 0.1)
    store = open_store()
    seen = (lambda: (None, ""), lambda events: None, lambda: 0)
    submissions = Submissions(Jobs(store), store, None, None, None, *seen)
    request.addfinalizer(postgresql.start)
    postgresql.stop()
    with pytest.raises(StoreUnavailable) as refused:
        submissions.submit_all([({"task": "run", "command": "true"}, "")], "key")
    assert refused.value.retry_after_s == 5


@pytest.mark.usefixtures("patient_store")
def test_benchmark_lines_of_a_broken_commit_are_stored_once(store, postgresql, url):
    killers = [threading.Thread(target=postgresql.sql, args=(url, KILL_OURS)) for _ in range(12)]
    for number in range(60):
        if number % 5 == 0:
            killers[number // 5].start()
        store.benchmarks.append("run", {"line": "result", "number": number})
    for killer in killers:
        killer.join()
    assert [line["number"] for line in store.benchmarks.read("run")] == list(range(60))


def test_without_the_driver_it_is_named_with_the_way_to_install_it(tmp_path):
    (tmp_path / "psycopg.py").write_text("raise ModuleNotFoundError('no psycopg', name='psycopg')")
    code = "from orchestrator.store.events.event_store import EventStore; EventStore('postgresql://127.0.0.1:1/x')"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "driver psycopg is missing" in ran.stderr and "pip install 'polyfleet[postgresql]'" in ran.stderr


def test_a_commit_is_on_disk_whatever_the_users_default_is(url, open_store, postgresql):
    database = url.partition("@/")[2].partition("?")[0]
    postgresql.sql(url, f"ALTER DATABASE {database} SET synchronous_commit = off")
    store = open_store()
    with store._database.connect() as connection:
        assert connection.exec_driver_sql("SHOW synchronous_commit").scalar() == "on"


def test_a_database_of_another_program_is_refused_and_left_alone(url, open_store, postgresql):
    postgresql.sql(url, "CREATE TABLE events (id int)")
    with pytest.raises(FleetError, match="has tables of another program: events"):
        open_store()
    assert postgresql.sql(url, "SELECT tablename FROM pg_tables WHERE schemaname = 'public'") == [("events",)]


def test_a_database_of_another_encoding_is_refused(postgresql):
    postgresql.sql("postgres", "CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0")
    with pytest.raises(UserError, match="has the encoding LATIN1; the job store needs UTF8"):
        EventStore(f"postgresql://{postgresql.user}@/latin?host={postgresql.folder}")


@pytest.mark.parametrize(
    "bad",
    [
        "postgresql://nobody:hunter2@127.0.0.1:1/none",
        "postgresql://127.0.0.1:1/none?user=nobody&password=hunter2",
        "postgresql://nobody:hunter2@127.0.0.1:1/none?options=-cfoo%3Dhunter2",
    ],
)
def test_no_error_shows_the_password(bad, caplog):
    caplog.set_level(logging.DEBUG)
    with pytest.raises(FleetError) as raised:
        EventStore(bad)
    assert "127.0.0.1" in str(raised.value)
    assert "hunter2" not in str(raised.value) + caplog.text


def test_the_newest_reports_of_a_page_and_the_events_of_nodes_are_found_by_index(store, postgresql, url):
    """Without it a list of jobs reads all reports there are for each job, and a start all events."""
    for number in range(50):
        store.append(life(f"job-{number}"))
    postgresql.sql(
        url,
        "INSERT INTO reports (seq, job, epoch, step, time, data)"
        " SELECT n, 'job-' || n % 50, 1, n, 0, '{}' FROM generate_series(1, 20000) AS n",
        "INSERT INTO events (seq, time, job, epoch, event, data)"
        " SELECT n, 0, 'old-' || n, 1, 'started', '{}' FROM generate_series(1000, 20000) AS n",
        "ANALYZE",
    )
    plans = []

    def explain(connection, cursor, statement, parameters, *_):
        if not statement.startswith("EXPLAIN"):
            plans.extend(row[0] for row in connection.exec_driver_sql(f"EXPLAIN {statement}", parameters))

    engine = store._database._readers
    sqlalchemy.event.listen(engine, "before_cursor_execute", explain)
    assert len(store.jobs.page((), "", None, 20).records) == 20
    assert store.events_below("node/") == []
    sqlalchemy.event.remove(engine, "before_cursor_execute", explain)
    told = "\n".join(plans)
    assert "Scan using reports_of_job" in told or "Scan Backward using reports_of_job" in told, told
    assert "events_of_job" in told, told
    assert "Seq Scan on reports" not in told and "Seq Scan on events" not in told, told
