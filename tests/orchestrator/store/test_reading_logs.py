"""The log of jobs for the simulator: read only, of each database, beside the server that writes it."""

from orchestrator.core.jobs.fold import submitted
from orchestrator.core.model import Candidate, Event, Job
from orchestrator.simulation.logs import read_log


def test_a_log_is_read_by_its_url_without_what_cannot_be_used(store, url):
    for name in ("a", "b", "odd"):
        store.append([submitted(Job(name, "j", "run", (Candidate(("cpu",)),), submitted_s=5.0), {}, 5.0)])
    store.append([Event("a", "cancelled", 0, 7.0), Event("node/n", "drained", 0, 8.0, {"reason": "r"})])
    store.append([Event("odd", "finished", 9, 9.0)])  # of an attempt that nobody placed
    log = read_log(url)
    assert {record.job.id: record.reason for record in log.records} == {"a": "", "b": "submitted"}
    assert (log.unreadable, log.newest_s) == (1, 9.0)
