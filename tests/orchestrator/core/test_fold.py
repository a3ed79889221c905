import json
from dataclasses import replace

import pytest

from cluster.serialization import to_json, to_plain
from orchestrator.core.jobs.fold import Attempt, Record, apply, ended, fold, ignored_reason, placed, running, submitted
from orchestrator.core.jobs.retry import AttemptEnd, decide_retry
from orchestrator.core.model import Candidate, Event, Recovery, Running, Start
from orchestrator.core.states import State

LEASES = (("a/cpu", (0,)), ("b/cpu", (0, 1)))


def story(w, *events):
    """The record after `submitted` and these (event, epoch, data), one second apart."""
    job = w.job("j", submitted_s=1.0)
    log = [submitted(job, {"entry": "train.py"}, 1.0)]
    log += [Event("j", event, epoch, float(s), data) for s, (event, epoch, data) in enumerate(events, start=2)]
    return fold(replace(event, seq=n) for n, event in enumerate(log, start=1))["j"]


def place(candidate=0):
    leases = [[devices_id, list(numbers)] for devices_id, numbers in LEASES]
    return {"candidate": candidate, "kind": "cpu", "pool": "cpu", "leases": leases, "reason": "fits"}


def test_both_ways_to_plain_data_give_the_same(w):
    """One of them is pydantic's: what the log holds does not depend on which."""
    want = Candidate(
        ("cpu", "tpu:v5e"), count=2, nodes=3, environment={"A": "\ud800"}, arguments={"x": [1, None, {"y": 0.5}]}
    )
    job = w.job("j", want, recovery=Recovery(on_events={"oom": "fail"}, retry_exit_codes=(75,)), submitted_s=1.0)
    assert to_json(job) == to_plain(job)
    assert json.dumps(to_json(job)) == json.dumps(to_plain(job))


def test_a_job_comes_back_from_the_log_as_it_was_submitted(w):
    wants = (
        Candidate(
            ("cuda",), 4, 2, 2, "p", "n", 7, "bf16", 8, {"A": "1"}, ("x", "y"), {"lr": 0.1, "deep": [{"a": None}]}
        ),
        Candidate(("cpu",)),
    )
    job = w.job(
        "j",
        *wants,
        ordered=True,
        priority=-3,
        objective="cost",
        workload="w",
        recovery=Recovery(1, 2, (3, 4), 5, 6, 7, {"oom": "fail"}, False, "wait", 30.0),
        entry="train.py",
        seed=7,
        package="sha",
        secrets={"A": "env:B"},
        keep_checkpoints=2,
        resume_from="pool:x/step-1",
    )
    event = submitted(job, {"name": "j"}, 9.0)
    stored = replace(event, data=json.loads(json.dumps(event.data)), seq=1)
    assert fold([stored]) == {"j": Record(replace(job, number=1), "submitted", seq=1)}


def test_a_whole_life_is_told_attempt_by_attempt(w):
    record = story(
        w,
        ("placed", 1, place()),
        ("started", 1, {}),
        ("checkpoint", 1, {"pool": "cpu", "path": "j/step-10", "step": 10}),
        ("preempted", 1, {"reason": "big needs the node"}),
        ("interrupted", 1, {"reason": "made room", "outcome": "preempted", "interruptions": 1}),
        ("placed", 2, place(1)),
        ("resumed", 2, {"step": 10}),
        ("started", 2, {}),
        ("finished", 2, {"reason": "done", "result": {"last_step": 20}}),
    )
    assert record == Record(
        job=replace(
            w.job("j", submitted_s=1.0), number=1, state=State.SUCCEEDED, epoch=2, interruptions=1, backend="cpu"
        ),
        reason="done",
        attempts=(
            Attempt(1, 0, "cpu", "cpu", LEASES, 2.0, 3.0, 6.0, "preempted", "made room"),
            Attempt(2, 1, "cpu", "cpu", LEASES, 7.0, 9.0, 10.0, "succeeded", "done"),
        ),
        checkpoint={"pool": "cpu", "path": "j/step-10", "step": 10},
        resumed_step=10,
        result={"last_step": 20},
        started_s=3.0,
        ended_s=10.0,
        seq=10,
    )


def test_the_failure_is_kept_until_a_later_attempt_succeeds(w):
    failure = {"rank": 0, "kind": "user", "message": "ValueError"}
    events = [("placed", 1, place()), ("interrupted", 1, {"failure": failure, "restarts": 1})]
    assert story(w, *events).failure == failure
    assert story(w, *events, ("placed", 2, place()), ("finished", 2, {})).failure is None
    assert story(w, *events, ("placed", 2, place()), ("failed", 2, {"failure": failure})).failure == failure


def test_events_of_an_older_epoch_are_refused(w):
    before = story(w, ("placed", 1, place()), ("interrupted", 1, {}), ("placed", 2, place()), ("started", 2, {}))
    for event in ("started", "finished", "failed", "interrupted", "checkpoint", "resumed", "released", "preempted"):
        late = Event("j", event, 1, 99.0, {"step": 1, "reason": "late"})
        assert ignored_reason(before, late) == f"event {event} is of attempt 1, but the job is at attempt 2"
        assert apply(before, late) is before


@pytest.mark.parametrize("epoch", [0, 1, 3])
def test_a_placement_counts_only_with_the_next_epoch(w, epoch):
    before = story(w, ("placed", 1, place()), ("interrupted", 1, {}))
    assert apply(before, Event("j", "placed", epoch, 9.0, place())) is before


def test_a_cancellation_counts_with_any_epoch_and_its_attempt_holds_devices_until_released(w):
    cancelled = story(w, ("placed", 1, place()), ("started", 1, {}), ("cancelled", 0, {"reason": "by its user"}))
    assert (cancelled.job.state, cancelled.reason, cancelled.ended_s) == (State.CANCELLED, "by its user", 4.0)
    held = Running("j", 0, 1, LEASES, stopping=True, spec=cancelled.job)
    assert running([cancelled]) == (held,)
    released = apply(cancelled, Event("j", "released", 1, 9.0, {"outcome": "cancelled", "reason": "by its user"}))
    assert running([released]) == ()
    assert released.attempts == (Attempt(1, 0, "cpu", "cpu", LEASES, 2.0, 3.0, 9.0, "cancelled", "by its user"),)
    assert released.job.state is State.CANCELLED
    assert ignored_reason(released, Event("j", "released", 1, 9.0)) == "nothing is left to release"


def test_an_end_is_final(w):
    done = story(w, ("placed", 1, place()), ("finished", 1, {"reason": "done"}))
    late = {"failed": {}, "cancelled": {}, "checkpoint": {"step": 1}, "placed": place(), "interrupted": {}}
    for event, data in late.items():
        epoch = 2 if event == "placed" else 1
        assert apply(done, Event("j", event, epoch, 9.0, data)) is done
        assert "SUCCEEDED" in ignored_reason(done, Event("j", event, epoch, 9.0, data))


def test_what_was_never_submitted_is_ignored_and_a_second_submission_too(w):
    assert fold([Event("ghost", "started", 1, 1.0)]) == {}
    again = submitted(w.job("j", priority=9), {}, 2.0)
    assert ignored_reason(story(w), again) == "j is already submitted"


def test_a_refused_job_ends_with_its_reason(w):
    refused = story(w, ("refused", 0, {"reason": "no pool has tpu:v5p"}))
    assert (refused.job.state, refused.reason, refused.ended_s) == (State.FAILED, "no pool has tpu:v5p", 2.0)


def test_only_working_attempts_are_not_stopping(w):
    def stopping(*events):
        return [r.stopping for r in running([story(w, ("placed", 1, place()), *events)])]

    assert stopping() == [False]
    assert stopping(("started", 1, {})) == [False]
    assert stopping(("preempted", 1, {})) == [True]
    assert stopping(("interrupted", 1, {})) == []


def test_builders_write_what_the_fold_reads(w):
    job = w.job("j")
    record = apply(apply(None, submitted(job, {}, 1.0)), placed(job, Start("j", 0, LEASES, "fits"), "cpu", "cpu", 2.0))
    assert record.live_attempt == Attempt(1, 0, "cpu", "cpu", LEASES, 2.0)
    assert record.reason == "fits"
    decision = decide_retry(record.job, AttemptEnd("lost", 0, "lost", "node a is lost", nodes=("a",)))
    event = ended(record.job, decision, 3.0, outcome="lost", failure={"message": "gone"})
    assert (event.event, event.epoch) == ("interrupted", 1)
    record = apply(record, event)
    assert record.job == replace(
        job, state=State.RECOVERING, epoch=1, interruptions=1, first_candidate=1, avoid=("a",), backend="cpu"
    )
    assert (record.attempts[0].outcome, record.reason) == ("lost", "node a is lost")


def test_an_attempt_keeps_its_candidate_when_migrations_replace_those_of_the_job(w):
    ranks, tpu, amd = Candidate(("cpu",), launch="ranks"), Candidate(("tpu:v5e",)), Candidate(("amd",))
    job = replace(w.job("j", Candidate(("nvidia",)), ranks), task="run")
    record = apply(apply(None, submitted(job, {}, 1.0)), placed(job, Start("j", 1, LEASES), "cpu", "cpu", 2.0))
    for candidate in (tpu, amd):
        record = apply(record, Event("j", "migrated", 0, 3.0, {"candidates": [to_plain(candidate)]}))
        assert record.candidate_of(record.attempts[0]) == ranks
        assert [attempt.want for attempt in running([record])] == [ranks]
    assert record.job.candidates == (amd,)


def test_an_epoch_that_a_node_has_seen_is_never_used_again(w):
    record = story(w, ("placed", 1, place()), ("interrupted", 1, {}), ("overtaken", 1, {"node": "a", "seen": 5}))
    assert (record.job.next_epoch, record.job.overtaken) == (6, True)
    assert apply(record, Event("j", "placed", 2, 9.0, place())) is record
    again = apply(record, Event("j", "placed", 6, 9.0, place()))
    assert (again.job.epoch, again.job.overtaken) == (6, True), "nothing has started since"
    assert not apply(again, Event("j", "started", 6, 9.0)).job.overtaken


def test_the_start_of_an_older_attempt_says_nothing_of_a_newer_one_that_a_node_has_seen(w):
    """It was placed before the log knew; once it has ended, the newer one may still run."""
    record = story(w, ("placed", 1, place()), ("overtaken", 1, {"node": "a", "seen": 5}))
    started = apply(record, Event("j", "started", 1, 9.0))
    assert (started.job.state, started.job.overtaken, started.job.next_epoch) == ("RUNNING", True, 6)


def test_a_migration_replaces_the_candidates_and_the_search_starts_anew(w):
    to = w.want("tpu:v5e")
    record = story(w, ("placed", 1, place()), ("migrated", 0, {"candidates": [to_plain(to)], "reason": "moves"}))
    assert (record.job.candidates, record.job.first_candidate, record.job.state) == ((to,), 0, State.STARTING)
