"""What jobs took that succeeded, as the planner is told."""

from orchestrator.core.jobs.fold import placed, submitted
from orchestrator.core.model import Candidate, Event, Job, Start
from orchestrator.runtime.jobs.histories import MAX_ROWS, MEDIAN_OF, Histories, newest_metrics
from orchestrator.runtime.jobs.jobs import Jobs
from orchestrator.store.events.unit_of_work import make_metrics_row

PACKAGE = "f" * 64


def ran(jobs, name, seconds, end="finished", *, kinds=("cpu",), **more):
    """A job with one attempt on each of `kinds`, two devices for so many seconds each."""
    job = Job(name, name, "train", (Candidate(("any",)),), **{"workload": "gpt2"} | more)
    events = [submitted(job, {}, 0.0)]
    for epoch, kind in enumerate(kinds, 1):
        job = Job(name, name, "train", job.candidates, epoch=epoch - 1)
        last = epoch == len(kinds)
        events += [
            placed(job, Start(name, 0, ((f"a/{kind}", (0, 1)),)), kind, "pool", 100.0),
            Event(name, "started", epoch, 110.0),
            Event(name, end if last else "interrupted", epoch, 110.0 + seconds),
        ]
    jobs.commit(events)


def test_the_median_of_what_succeeded_counts_at_a_start_and_as_more_jobs_end(store, jobs):
    ran(jobs, "one", 10.0)
    ran(jobs, "two", 30.0)
    ran(jobs, "broken", 900.0, "failed")
    ran(jobs, "moved", 900.0, kinds=("cpu", "tpu:v5e"))
    histories = Histories(jobs)
    assert histories.newest().rows == {("gpt2", "train"): {"cpu": 40.0}}
    again = histories.newest()
    assert again is histories.newest()
    ran(jobs, "three", 50.0)
    ran(jobs, "elsewhere", 1.0, kinds=("tpu:v5e",))
    assert histories.newest().rows == {("gpt2", "train"): {"cpu": 60.0, "tpu:v5e": 2.0}}
    assert Histories(Jobs(store)).newest() == histories.newest()


def test_only_the_last_jobs_of_a_workload_count(jobs):
    histories = Histories(jobs)
    for number in range(MEDIAN_OF + 1):
        ran(jobs, f"old-{number}", 1000.0)
    histories.newest()
    for number in range(MEDIAN_OF):
        ran(jobs, f"new-{number}", 1.0)
    assert histories.newest().rows == {("gpt2", "train"): {"cpu": 2.0}}


def test_a_job_counts_for_its_workload_and_for_its_folder(jobs):
    ran(jobs, "one", 10.0, content_sha=PACKAGE)
    ran(jobs, "bare", 10.0, workload="")
    rows = Histories(jobs).newest().rows
    assert set(rows) == {("gpt2", "train"), (f"folder:{'f' * 16}", "train")}


def test_what_was_tried_counts_however_it_ended(store, jobs):
    histories = Histories(jobs)
    ran(jobs, "broken", 900.0, "failed")
    ran(jobs, "moved", 10.0, kinds=("cpu", "tpu:v5e"))
    tried = {("gpt2", "train"): {"cpu": 1820.0, "tpu:v5e": 20.0}}
    assert (histories.newest().rows, histories.newest().all_runs) == ({}, tried)
    assert Histories(Jobs(store)).newest().all_runs == tried


def test_a_server_that_starts_reads_the_newest_metrics_of_many_jobs_at_once(store, jobs, wait_for):
    for name in ("one", "two", "silent"):
        ran(jobs, name, 1.0)
    for step in (1, 2):
        store.metrics.queue(make_metrics_row("one", 1, step, 5.0, {"step": step, "of": 9}))
    store.metrics.queue(make_metrics_row("two", 1, 7, 5.0, {"step": 7}))
    wait_for(lambda: len(store.metrics.read("one")) == 2 and store.metrics.read("two"))
    names = ["one", "two", "silent", "unknown"]
    assert store.metrics.last_of(names) == {"one": {"step": 2, "of": 9}, "two": {"step": 7}}


def test_the_newest_metrics_of_ended_and_of_open_jobs_are_read_at_a_start(store, jobs, wait_for):
    ran(jobs, "ended", 10.0)
    jobs.commit([submitted(Job("waits", "waits", "train", (Candidate(("any",)),)), {}, 0.0)])
    job = Job("open", "open", "train", (Candidate(("any",)),), workload="gpt2")
    on_a = placed(job, Start("open", 0, (("a/cpu", (0,)),)), "cpu", "pool", 100.0)
    jobs.commit([submitted(job, {}, 0.0), on_a, Event("open", "started", 1, 110.0)])
    for step in range(MAX_ROWS + 5):
        for name in ("open", "ended"):
            store.metrics.queue(make_metrics_row(name, 1, step, 110.0 + step, {"step": step}))
    wait_for(lambda: all(len(store.metrics.read(name)) == MAX_ROWS + 5 for name in ("open", "ended")))
    found = [(record.job.id, [row["step"] for row in rows]) for record, rows in newest_metrics(jobs, store)]
    newest = list(range(5, MAX_ROWS + 5))
    assert found == [("ended", newest), ("open", newest)]
