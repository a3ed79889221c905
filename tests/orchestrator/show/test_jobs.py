"""What `show` and `explain` tell of a job."""

import re
from dataclasses import replace

import pytest
from rich.console import Console

from orchestrator.core.jobs.fold import Attempt, Record
from orchestrator.core.jobs.remaining_time import Evidence
from orchestrator.core.model import DeclaredWork, Progress
from orchestrator.core.states import State
from orchestrator.services.views import job_view, progress_view
from orchestrator.show.jobs import ended_as, job, offers, plan, run_time
from orchestrator.spec.job_spec import parse_job

ALLOCATIONS = [{"devices": "a/cpu", "numbers": [0, 2]}, {"devices": "b/cpu", "numbers": [1]}]


def text(shown):
    console = Console(width=300)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def told(job_id, task, state, *, metrics=None, **given):
    """A job as the server tells it."""
    as_submitted = parse_job({"name": job_id[0], "task": task, "entry": "a:b"}).to_job(job_id, 1.0)
    return job_view(Record(replace(as_submitted, state=State(state)), **given), metrics or {})


def candidate(**given):
    return {"candidate": 1, "kinds": ["nvidia:H100"], "count": 8, "nodes": 1, "fits": [], "refused": {}} | given


def answer(*candidates, **given):
    return {"candidates": list(candidates), "would_start": None} | given


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"would_start": {"candidate": 2, "allocations": ALLOCATIONS}},
         "would start as candidate 2 on a/cpu [0, 2], b/cpu [1]"),
        ({}, "would wait: nothing fits now"),
        ({"preempt": ["low-1"]}, "would wait until low-1 have saved and stopped"),
        ({"impossible": "no pool has tpu:v5p"}, "can never start: no pool has tpu:v5p"),
        ({"state": "PENDING", "reason": "waits for 8 devices"}, "PENDING: waits for 8 devices"),
        ({"policy": "cost", "policy_fault": ""}, "policy cost orders jobs of equal priority"),
        ({"policy": "theirs", "policy_fault": "policy 'theirs' raised KeyError: 'x'"},
         "jobs of equal priority are served in the order of submission, because policy 'theirs' raised KeyError: 'x'"),
        ({"state": "RUNNING", "reason": "", "missed": ["x"]}, "it resumed without part of its state: x"),
    ],
)  # fmt: skip
def test_a_plan_ends_with_what_would_happen(given, sentence):
    assert sentence in text(plan(answer(candidate(fits=["a/cpu"]), **given)))


def test_every_refusal_of_a_plan_is_a_line():
    shown = text(
        plan(
            answer(candidate(refused={"a/cpu": "is cpu", "": "no island has 2 nodes"}, nodes=2), candidate(candidate=1))
        )
    )
    lines = [line.split("  ") for line in shown.splitlines()]
    assert "8 × nvidia:H100 on each of 2 nodes" in shown
    assert [part.strip() for part in lines[1] if part.strip()][-2:] == ["a/cpu", "is cpu"]
    assert [part.strip() for part in lines[2] if part.strip()][-2:] == ["all", "no island has 2 nodes"]
    assert "no node has such a device" in lines[3][-1] + lines[3][-2]


def test_a_failure_shows_rank_node_and_the_users_own_frames():
    failure = {
        "rank": 3,
        "node": "gpu-1",
        "kind": "user",
        "message": "ValueError: x",
        "traceback": 'File "train.py", line 3',
        "exit_code": 1,
    }
    shown = text(job(told("a-1", "train", "FAILED", failure=failure, metrics={"loss": 0.25, "step": 7})))
    assert "rank 3 on node gpu-1 (user, exit code 1): ValueError: x" in shown
    assert 'File "train.py", line 3' in shown
    assert "loss=0.25, step=7" in shown


def attempt(epoch, outcome, reason="", **given):
    at = "2026-11-20T11:00:0{}Z"
    times = {"placed_at": at.format(epoch), "started_at": None, "ended_at": at.format(epoch + 2)}
    return {"attempt": epoch, "outcome": outcome, "reason": reason} | times | given


def test_how_long_a_job_too_short_to_be_seen_running_took_counts_from_its_placement():
    ended = {"started_at": None, "ended_at": "2026-11-20T11:00:03Z", "attempts": [attempt(1, "succeeded")]}
    assert (run_time(ended), run_time(ended["attempts"][0])) == ("2 s", "2 s")
    assert run_time(ended | {"started_at": "2026-11-20T11:00:02Z"}) == "1 s"
    lost = {"started_at": "2026-11-20T11:00:02Z", "ended_at": None, "known_until": "2026-11-20T11:00:07Z"}
    assert run_time(lost) == "5 s", "so long it ran as far as anybody knows"
    assert run_time(lost | {"known_until": lost["started_at"]}) == "", "not 0 s: its node may have run it ever since"
    assert run_time(ended | {"attempts": []}) == ""
    assert run_time({"started_at": None, "ended_at": None, "attempts": [attempt(1, "", ended_at=None)]}) == ""


@pytest.mark.parametrize(
    ("first", "state", "reason", "ends"),
    [
        (attempt(1, "failed", "a rank was killed"), "RUNNING", "", ["interrupted", ""]),
        (attempt(1, "failed", "restart 1 of 2: ValueError"), "RUNNING", "", ["failed", ""]),
        (attempt(1, "lost", "its node is gone"), "RUNNING", "", ["lost", ""]),
        (attempt(1, "preempted", "made room"), "RUNNING", "", ["preempted", ""]),
    ],
)
def test_an_attempt_ended_as_its_job_saw_it(first, state, reason, ends):
    view = {"state": state, "reason": reason, "attempts": [first, attempt(2, "")]}
    assert [ended_as(a, view) for a in view["attempts"]] == ends


def test_the_attempt_a_job_failed_with_has_failed_and_one_it_was_refused_after_has_not():
    view = {"state": "FAILED", "reason": "ValueError", "attempts": [attempt(1, "failed", "ValueError")]}
    assert ended_as(view["attempts"][0], view) == "failed"
    assert ended_as(view["attempts"][0], view | {"reason": "no pool has it any more"}) == "interrupted"
    assert ended_as(view["attempts"][0], view | {"state": "CANCELLED", "reason": "by the user"}) == "interrupted"


def test_what_a_benchmark_measured_is_a_table_and_a_result_of_another_form_is_shown_as_it_is():
    right = {"case": "forward", "status": "measured", "reason": "", "median_s": 2e-3, "ci_low_s": 1.9e-3,
             "ci_high_s": 2.25e-3, "single_call_s": 2.1e-3, "items_per_s": 32000.0, "samples_s": [2e-3] * 7,
             "first_call_s": 0.31, "accuracy": {"ok": True, "rms_rel": 1.34e-7}}  # fmt: skip
    wrong = {"case": "training_step", "status": "wrong", "reason": "odd values", "median_s": None, "ci_low_s": None,
             "ci_high_s": None, "single_call_s": None, "items_per_s": None, "samples_s": [], "first_call_s": 0.02,
             "accuracy": {"ok": False}}  # fmt: skip
    host = {"class": "shared", "reasons": ["tasks waited for a CPU 18 % of the time"]}
    result = {"rows": [right, wrong], "noise": 0.042, "host": host, "kind": "cpu", "torch": "2.13.0"}
    shown = text(job(told("b-1", "benchmark", "SUCCEEDED", result=result))).splitlines()
    words = [re.split(r" {2,}", line.rstrip()) for line in shown]
    cells = {name: told for name, *told in words}
    assert cells["forward"] == ["2 ms", "1.9 ms to 2.25 ms", "2.1 ms", "32,000", "310 ms", "1.3e-07"]
    assert cells["training_step"] == ["WRONG", "20 ms", "odd values"]
    assert cells["noise"] == ["of this host (one configuration measured twice): at most 4.2%"]
    assert cells["host"] == ["shared: tasks waited for a CPU 18 % of the time"]
    assert "samples_s" not in "".join(shown)
    old = text(job(told("b-1", "benchmark", "SUCCEEDED", result={"rows": [{"case": "forward"}]})))
    assert '"case": "forward"' in old


def test_where_copies_lie_and_what_an_attempt_began_without_is_shown():
    replica = {"pool": "far", "path": "j/step-1", "step": 1, "node": "far-b"}
    shown = text(
        job(told("j-1", "train", "RUNNING", replicas=(replica,), unreplicated="no room", missed_files="b is away"))
    )
    for row in (r"copies +step 1 on far-b \(far:j/step-1\)", "not copied +no room", "missed files +b is away"):
        assert re.search(row, shown), shown


def under_way(**more):
    """A record of a job with an attempt on two CPUs."""
    as_submitted = parse_job({"entry": "a:b"} | more.pop("spec", {})).to_job("j", 1.0)
    live = Attempt(1, 0, "cpu", "cpu", (("a/cpu", (0, 1)),), 1.0, 2.0)
    return Record(replace(as_submitted, state=State(more.pop("state", "RUNNING"))), attempts=(live,), **more)


def test_a_job_shows_how_far_it_is_and_how_long_it_will_take_yet():
    record = under_way()
    told = progress_view(
        record, Evidence(progress=Progress(400, 1000, rates={("cpu", 2): 3.0}), attained={"cpu": 260.0})
    )
    assert told == {
        "step": 400,
        "of": 1000,
        "steps_per_s": 3.0,
        "left_s": 200.0,
        "left_from": "reported",
        "left": "about 3 min left at 3 steps/s (reported)",
    }
    shown = text(job(job_view(record, {}, "", told)))
    assert "step 400 of 1000 (40 %), about 3 min left at 3 steps/s (reported)" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("spec", "progress", "line"),
    [
        ({}, Progress(), None),
        ({}, Progress(7), "step 7, time left unknown"),
        ({"work": {"steps": 10}}, Progress(7), "step 7 of 10 (70 %), about 43 s left at 0.07 steps/s (declared)"),
        ({"work": {"hours": 2, "on": "cpu"}}, Progress(), "step 0, about 60 min left (declared)"),
    ],
)
def test_a_guess_of_how_long_is_left_is_not_shown_as_if_it_were_known(spec, progress, line):
    ran_s = 200.0 if progress.step else 1.0
    record = under_way(spec=spec)
    told = progress_view(record, Evidence(progress=progress, attained={"cpu": ran_s}))
    shown = " ".join(text(job(job_view(record, {}, "", told))).split())
    assert line in shown if line else "progress" not in shown


def test_a_job_that_ended_or_that_ran_nowhere_has_no_progress_in_its_view():
    assert progress_view(under_way(state="SUCCEEDED"), Evidence()) is None
    assert progress_view(replace(under_way(), attempts=()), Evidence()) is None
    assert DeclaredWork() == parse_job({"entry": "a:b"}).to_job("j", 1.0).work


def offer(**given):
    known = {"candidate": 1, "pool": "cpu", "kind": "cpu", "count": 2, "min_count": 2, "nodes": 1, "when": "now"}
    told = {"wait": "now", "chosen": False, "speed": "unmeasured", "price_per_hour": None, "reason": ""}
    return known | told | {"price_per_million_items": None} | given


def test_offers_are_lines_and_places_without_the_devices_asked_for_only_where_there_is_no_other():
    other = {"when": "not_asked_for", "wait": "never here", "reason": "is cpu"}
    found = [offer(chosen=True, nodes=3), offer(min_count=1, price_per_hour=2.5), offer(**other)]
    lines = text(offers({"offers": [*found, offer(candidate=2, **other)], "impossible": ""})).splitlines()
    cells = [[cell for cell in re.split("  +", line.strip()) if cell] for line in lines]
    assert cells[1:] == [
        ["✓", "1", "cpu", "2 × cpu on each of 3 nodes", "now", "unmeasured"],
        ["1", "cpu", "1 to 2 × cpu", "now", "unmeasured", "2.5"],
        ["2", "cpu", "2 × cpu", "never here", "unmeasured", "is cpu"],
    ]
    assert text(offers({"offers": [], "impossible": "no node yet"})) == "nothing to offer: no node yet\n"
    assert "can never start: no pool" in text(offers({"offers": [offer(**other)], "impossible": "no pool"}))
