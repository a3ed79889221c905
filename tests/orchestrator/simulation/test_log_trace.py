"""A server's log as a trace: what jobs really did, where else they may run, and what another policy would have done."""

import re
from dataclasses import replace

import numpy as np
import pytest

from cluster.catalogue.precision import short_name
from cluster.errors import UserError
from cluster.serialization import to_plain
from orchestrator.core.jobs.fold import fold, placed, submitted
from orchestrator.core.model import Candidate, Event, Job, Recovery, Start
from orchestrator.core.throughput import Measured, Throughput
from orchestrator.simulation.fleets import read_fleet
from orchestrator.simulation.log_trace import JobStoreLog, convert_log
from orchestrator.simulation.logs import read_log
from orchestrator.simulation.replay import replay
from orchestrator.store.database.backup import backup
from orchestrator.store.events.event_store import EventStore

H100, TPU = "nvidia:H100-80GB", "tpu:v5e"
GPT2 = ((("gpt2", "train", H100, short_name("")), 300.0), (("gpt2", "train", TPU, short_name("")), 100.0))
CHECKPOINT = {"pool": "p", "path": "x/step-1", "step": 1, "node": "n", "at": 0}


def job(name, *candidates, at_s=0.0, **more):
    return Job(name, name, more.pop("task", "train"), candidates or (Candidate((H100,)),), submitted_s=at_s, **more)


def ran(of, *attempts, end="finished"):
    """The events of a job with attempts of (kind, devices, placed_s, started_s or None, ended_s or None)."""
    events = [submitted(of, {}, of.submitted_s)]
    for number, (kind, count, placed_s, started_s, ended_s) in enumerate(attempts, start=1):
        start = Start(of.id, 0, ((f"node/{kind}", tuple(range(count))),))
        events.append(replace(placed(of, start, kind, "pool", placed_s), epoch=number))
        events += [Event(of.id, "started", number, started_s)] if started_s is not None else []
        last = end if number == len(attempts) else "interrupted"
        events += [Event(of.id, last, number, ended_s, {"reason": "r"})] if ended_s is not None else []
    return events


def log_of(*stories, newest_s=10_000.0, rates=()):
    events = [event for story in stories for event in story]
    records = fold(replace(event, seq=n) for n, event in enumerate(events, start=1))
    measured = {key: Measured(rate, rate, rate, "sample", "run", 0.0) for key, rate in rates}
    return JobStoreLog("made.db", tuple(records.values()), 0, Throughput(measured), newest_s)


def test_jobs_come_as_they_were_submitted_with_the_time_their_attempts_ran():
    one = ran(job("one", at_s=100.0), (H100, 1, 110.0, 130.0, 430.0))
    two = ran(job("two", at_s=50.0), (H100, 2, 50.0, 60.0, 260.0), (H100, 2, 300.0, 310.0, 360.0))
    found = convert_log(log_of(one, two), None)
    assert found.trace.arrival_s.tolist() == [0.0, 50.0]
    assert found.trace.gang.tolist() == [2, 1]
    assert found.trace.steps.tolist() == [250.0, 300.0]
    assert found.trace.rate.tolist() == [[1.0, 1.0]]
    assert dict(zip(found.fleet.kinds, found.fleet.devices.tolist(), strict=True)) == {H100: 3}
    assert found.as_it_was["mean_jct_h"] == pytest.approx((310 + 330) / 2 / 3600, rel=1e-5)
    assert found.as_it_was["makespan_h"] == pytest.approx(380 / 3600, rel=1e-5)
    assert (found.starts_s, found.assumed, found.unfinished) == (10.0, 0, 0)


def test_the_fleet_is_what_was_held_at_a_time_from_placement_to_release():
    first = ran(job("a"), (H100, 2, 0.0, 5.0, 100.0))
    after = ran(job("b", at_s=1.0), (H100, 2, 100.0, 105.0, 200.0))
    beside = ran(job("c", at_s=2.0), (H100, 1, 150.0, 155.0, 160.0))
    assert convert_log(log_of(first, after, beside), None).fleet.devices.tolist() == [3]


def test_jobs_that_never_ran_and_histories_without_sense_are_left_out_and_counted():
    never = ran(job("never"))
    refused = ran(job("refused"), (H100, 1, 5.0, None, 6.0), end="failed")
    strange = ran(job("strange", at_s=1e300), (H100, 1, 5.0, 6.0, 7.0))
    good = ran(job("good"), (H100, 1, 5.0, 6.0, 7.0))
    found = convert_log(log_of(never, refused, strange, good), None)
    assert found.trace.jobs == 1
    assert found.skipped == {"never_ran": 2, "no_kind": 0, "unreadable": 1}


def test_a_job_that_still_runs_counts_as_ended_with_the_log():
    found = convert_log(log_of(ran(job("a"), (H100, 1, 0.0, 10.0, None)), newest_s=110.0), None)
    assert (found.trace.steps.tolist(), found.unfinished) == ([100.0], 1)
    assert found.as_it_was["mean_jct_h"] == pytest.approx(110 / 3600, rel=1e-5)


def test_on_another_kind_that_it_accepts_a_job_has_the_measured_rate_or_else_the_same():
    both = Candidate((H100,)), Candidate((TPU,))
    measured, assumed, alone = job("m", *both, workload="gpt2"), job("a", *both, at_s=1.0), job("f", at_s=2.0)
    stories = [ran(j, (H100, 1, float(n), 5.0, 95.0)) for n, j in enumerate((measured, assumed, alone))]
    found = convert_log(log_of(*stories, rates=GPT2), read_fleet(f"{H100}=2,{TPU}=4"))
    assert found.trace.rate[0].tolist() == [1.0, 1.0, 1.0]
    assert found.trace.rate[1].tolist() == [pytest.approx(1 / 3), 1.0, 0.0]
    assert found.assumed == 1


def test_work_on_several_kinds_is_told_in_seconds_of_the_one_it_ran_longest_on():
    moved = job("m", Candidate((H100, TPU)), workload="gpt2")
    story = ran(moved, (TPU, 1, 0.0, 0.0, 300.0), (H100, 1, 300.0, 300.0, 700.0))
    found = convert_log(log_of(story, rates=GPT2), None)
    assert found.trace.steps.tolist() == [pytest.approx(400.0 + 100.0)]
    assert found.trace.rate[:, 0].tolist() == [1.0, pytest.approx(1 / 3)]


def test_a_job_that_was_migrated_has_the_measured_rates_of_the_candidates_it_ran_as():
    migrated = job("m", Candidate((TPU,), precision="bf16"), workload="gpt2")
    first, second = (TPU, 1, 0.0, 0.0, 300.0), (H100, 1, 300.0, 300.0, 700.0)
    story = ran(migrated, first, second)
    at = next(n for n, event in enumerate(story) if (event.event, event.epoch) == ("placed", 2))
    to = {"candidates": [to_plain(Candidate((H100,)))], "reason": "moves"}
    story.insert(at, Event("m", "migrated", 1, 300.0, to))
    rates = (GPT2[0], (("gpt2", "train", TPU, "bf16"), 150.0))
    found = convert_log(log_of(story, rates=rates), None)
    assert found.trace.steps.tolist() == [pytest.approx(400.0 + 150.0)]
    assert (found.trace.rate[:, 0].tolist(), found.assumed) == ([1.0, pytest.approx(1 / 2)], 0)


@pytest.mark.parametrize(
    ("candidate", "takes"),
    [
        (Candidate(("any",)), True),
        (Candidate(("tpu",)), True),
        (Candidate(("tpu",), count=2, min_count=2), False),
        (Candidate(("tpu",), count=4), True),
        (Candidate(("tpu",), memory_bytes=40 << 30), False),
        (Candidate(("tpu",), node="node-1"), False),
        (Candidate(("any",), pool="elsewhere"), False),
        (Candidate(("any",), pool="pool"), True),
    ],
    ids=range(8),
)
def test_a_job_goes_only_where_a_candidate_of_it_fits(candidate, takes):
    asked = ran(job("j", Candidate((H100,)), candidate), (H100, 1, 0.0, 5.0, 95.0))
    other = ran(job("k", Candidate((TPU,)), at_s=1.0), (TPU, 1, 1.0, 5.0, 95.0))
    found = convert_log(log_of(asked, other), read_fleet(f"{H100}=1,{TPU}=4"))
    assert bool(found.trace.rate[1, 0]) == takes


def test_a_job_that_may_not_cross_vendors_stays_with_its_own():
    fixed = job("j", Candidate(("any",)), recovery=Recovery(cross_vendor=False))
    found = convert_log(
        log_of(ran(fixed, (H100, 1, 0.0, 5.0, 95.0))), read_fleet(f"{H100}=1,{TPU}=4,nvidia:A100-40GB=1")
    )
    assert found.trace.rate[:, 0].tolist() == [1.0, 0.0, 1.0]


def test_what_no_kind_of_the_fleet_takes_is_left_out_and_counted():
    small = ran(job("s"), (H100, 1, 0.0, 5.0, 95.0))
    large = ran(job("l", Candidate((H100,), count=8)), (H100, 8, 0.0, 5.0, 95.0))
    found = convert_log(log_of(small, large), read_fleet("H100-80GB=2"))
    assert (found.fleet.kinds, found.skipped["no_kind"], found.trace.jobs) == ((H100,), 1, 1)


def test_priorities_are_strict_tiers():
    low = ran(job("low"), (H100, 1, 0.0, 0.0, 10.0))
    high = ran(job("high", priority=5), (H100, 1, 10.0, 10.0, 1010.0))
    found = convert_log(log_of(low, high), None)
    assert replay(found.trace, found.fleet, "finish_time").end_s.tolist() == [1010.0, 1000.0]


def test_a_job_that_has_saved_nothing_is_not_stopped():
    stays = ran(job("stays", task="run"), (H100, 1, 0.0, 0.0, 1000.0))
    saves = ran(job("saves", task="run"), (H100, 1, 0.0, 0.0, None))
    saves += [Event("saves", "checkpoint", 1, 500.0, CHECKPOINT), Event("saves", "finished", 1, 1000.0, {})]
    later = ran(job("later", at_s=10.0, priority=5), (H100, 1, 20.0, 20.0, 30.0))
    assert convert_log(log_of(stays, saves, later), None).trace.unsaved.tolist() == [True, False, False]
    found = convert_log(log_of(stays, later), read_fleet(f"{H100}=1"))
    assert replay(found.trace, found.fleet, "finish_time").end_s.tolist() == [1000.0, 1010.0]


def test_only_jobs_of_the_time_asked_for_are_taken():
    stories = [ran(job(f"j{n}", at_s=n * 100.0), (H100, 1, n * 100.0, n * 100.0, n * 100.0 + 50)) for n in range(4)]
    found = convert_log(log_of(*stories), None, since_s=100.0, until_s=300.0)
    assert found.trace.arrival_s.tolist() == [0.0, 100.0]


@pytest.mark.parametrize(
    ("fleet", "since_s", "told"),
    [
        ("nvidia:H10=4", 0.0, "--fleet: unknown kind 'nvidia:H10'"),
        ("tpu:v5e=4", 0.0, "--fleet: no kind of the fleet (tpu:v5e) takes any of the 1 jobs of made.db; they ran on"),
        ("", 1e6, "--log: made.db has no job submitted in that time"),
    ],
)
def test_a_log_of_which_nothing_can_be_simulated_is_the_users_mistake(fleet, since_s, told):
    with pytest.raises(UserError, match=re.escape(told)):
        convert_log(log_of(ran(job("j"), (H100, 1, 0.0, 5.0, 95.0))), read_fleet(fleet) if fleet else None, since_s)


def measured(kind, call_s):
    """The lines of a run about one kind."""
    yield {"line": "target", "target": kind, "facts": {"kind": kind}}
    blocks = [{"round": n, "calls": 1, "parts_s": [call_s], "at": 1.0} for n in range(9)]
    yield {
        "line": "result", "target": kind, "case": "gpt2/train", "workload": "gpt2", "mode": "train", "items": 1,
        "item": "sample", "precision": "fp32", "level": "O1", "regime": "hot", "status": "measured", "blocks": blocks,
    }  # fmt: skip


@pytest.fixture
def home(tmp_path):
    """A server's home with a store of three jobs that ran, one that did not, and benchmark results of two kinds."""
    (tmp_path / "home").mkdir()
    store = EventStore(f"sqlite:///{tmp_path / 'home' / 'polyfleet.db'}")
    both = Candidate((H100,)), Candidate((TPU,))
    stories = [
        ran(job(f"j{n}", *both, at_s=60.0 * n), (H100, 1, 1e3 * n, 1e3 * n + 30, 1e3 * n + 900)) for n in range(3)
    ]
    store.append([event for story in (*stories, ran(job("never"))) for event in story])
    for line in ({"line": "started", "run": "r"}, *measured(H100, 0.5), *measured(TPU, 1.0)):
        store.benchmarks.append("r", line)
    store.benchmarks.append("damaged", {"line": "result"})
    yield tmp_path / "home"
    store.close()


def test_a_log_is_read_while_the_server_has_it_open_and_from_its_backup(home, tmp_path):
    backup(f"sqlite:///{home / 'polyfleet.db'}", tmp_path / "saved.db")
    logs = [read_log(str(place)) for place in (home, home / "polyfleet.db", tmp_path / "saved.db")]
    assert [len(log.records) for log in logs] == [4, 4, 4]
    assert [convert_log(log, None).trace.steps.tolist() for log in logs] == [[870.0] * 3] * 3
    rates = [{key[2]: told.items_per_s for key, told in log.throughput.rows.items()} for log in logs]
    assert rates == [{H100: 2.0, TPU: 1.0}] * 3
    assert logs[0].newest_s == 0.0  # of the job that was submitted last
    assert np.allclose(convert_log(logs[0], None).as_it_was["makespan_h"], 2900 / 3600)


def test_a_home_may_say_that_its_jobs_are_elsewhere(home, tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "database-url").touch(0o600)
    (tmp_path / "other" / "database-url").write_text(f"sqlite:///{home / 'polyfleet.db'}\n")
    monkeypatch.setenv("POLYFLEET_DATABASE_URL", "sqlite:////nowhere/of-our-own.db")
    assert len(read_log(str(tmp_path / "other")).records) == 4


@pytest.mark.parametrize("place", ["absent", "file", "empty"])
def test_what_is_no_log_is_told(tmp_path, place):
    (tmp_path / "file").write_text("job_id,arrival_time_s\n" * 100)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"--log|there is no job store in"):
        read_log(str(tmp_path / place))
