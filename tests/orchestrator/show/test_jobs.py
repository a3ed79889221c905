"""What `show` and `explain` tell of a job."""

import re
from dataclasses import replace

import pytest
from rich.console import Console

from orchestrator.core.fold import Record
from orchestrator.core.states import State
from orchestrator.runtime.views import job_view
from orchestrator.show.jobs import ended_as, job, plan, ran
from orchestrator.spec import parse_job

LEASES = [["a/cpu", [0, 2]], ["b/cpu", [1]]]


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
    return {"candidate": 0, "kinds": ["nvidia:H100"], "count": 8, "nodes": 1, "fits": [], "refused": {}} | given


def answer(*candidates, **given):
    return {"candidates": list(candidates), "would_start": None} | given


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"would_start": {"candidate": 1, "leases": LEASES}}, "would start as candidate 2 on a/cpu [0, 2], b/cpu [1]"),
        ({}, "would wait: nothing fits now"),
        ({"preempt": ["low-1"]}, "would wait until low-1 have saved and stopped"),
        ({"impossible": "no pool has tpu:v5p"}, "can never start: no pool has tpu:v5p"),
        ({"state": "PENDING", "reason": "waits for 8 devices"}, "PENDING: waits for 8 devices"),
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
    return {"epoch": epoch, "outcome": outcome, "reason": reason} | times | given


def test_how_long_a_job_too_short_to_be_seen_running_took_counts_from_its_placement():
    ended = {"started_at": None, "ended_at": "2026-11-20T11:00:03Z", "attempts": [attempt(1, "succeeded")]}
    assert (ran(ended), ran(ended["attempts"][0])) == ("2 s", "2 s")
    assert ran(ended | {"started_at": "2026-11-20T11:00:02Z"}) == "1 s"
    assert ran(ended | {"attempts": []}) == ""
    assert ran({"started_at": None, "ended_at": None, "attempts": [attempt(1, "", ended_at=None)]}) == ""


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
             "ci_high_s": 2.25e-3, "alone_s": 2.1e-3, "items_per_s": 32000.0, "samples_s": [2e-3] * 7,
             "first_call_s": 0.31, "accuracy": {"ok": True, "rms_rel": 1.34e-7}}  # fmt: skip
    wrong = {"case": "training_step", "status": "wrong", "reason": "odd values", "median_s": None, "ci_low_s": None,
             "ci_high_s": None, "alone_s": None, "items_per_s": None, "samples_s": [], "first_call_s": 0.02,
             "accuracy": {"ok": False}}  # fmt: skip
    host = {"class": "shared", "reasons": ["tasks waited for a CPU 18 % of the time"]}
    result = {"rows": [right, wrong], "noise": 0.042, "host": host, "kind": "cpu", "torch": "2.13.0"}
    shown = text(job(told("b-1", "benchmark", "SUCCEEDED", result=result))).splitlines()
    words = [re.split(r" {2,}", line.rstrip()) for line in shown]
    cells = {name: told for name, *told in words}
    assert cells["forward"] == ["2 ms", "1.9 ms to 2.25 ms", "2.1 ms", "32,000", "310 ms", "1.3e-07"]
    assert cells["training_step"] == ["WRONG", "20 ms", "odd values"]
    assert cells["noise"] == ["the same measured twice differed by at most 4.2%"]
    assert cells["host"] == ["shared: tasks waited for a CPU 18 % of the time"]
    assert "samples_s" not in "".join(shown)
    old = text(job(told("b-1", "benchmark", "SUCCEEDED", result={"rows": [{"case": "forward"}]})))
    assert '"case": "forward"' in old
