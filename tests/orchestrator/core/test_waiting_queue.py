"""Why a job waits, in one sentence, and how many jobs are ahead of it."""

from dataclasses import replace

from orchestrator.core.explanation.waiting_queue import WaitingQueue
from orchestrator.core.jobs.fold import Record
from orchestrator.core.model import Plan
from orchestrator.core.plan.options.placement_options import summary
from orchestrator.core.plan.plan import plan


def test_what_holds_for_the_whole_fleet_stands_alone(w):
    reasons = {
        (0, "cpu-0/cpu"): "is in pool cpu, but the job requires pool xla",
        (0, ""): "waits for 1 device on xla-0/tpu",
    }
    assert summary(w.job("j"), reasons) == "waits for 1 device on xla-0/tpu"


def test_what_devices_lack_is_told_with_the_name_of_each(w):
    reasons = {(0, f"{node}/cpu"): "takes no jobs" for node in "abcd"}
    told = "a/cpu takes no jobs; b/cpu takes no jobs; `polyfleet explain` shows 2 more"
    assert (summary(w.job("j"), reasons), summary(w.job("j"), {})) == (told, "")


def test_jobs_that_wait_for_the_same_devices_count_those_ahead_and_no_others(w):
    fleet = [w.cpu(free=()), w.devices("a", 1, free=())]
    wants = {"one": ("cpu", 0, 1), "two": ("cpu", 0, 2), "late": ("cpu", 3, 3), "gpu": ("nvidia", 0, 4)}
    waiting = [
        replace(w.job(name, w.want(kind)), priority=priority, number=number)
        for name, (kind, priority, number) in wants.items()
    ]
    decided = plan(w.snapshot(fleet, waiting))
    line = WaitingQueue(decided, {job.id: Record(job) for job in waiting})
    cpu = "waits for 1 device on cpu-0/cpu"
    assert {job.id: line.waiting_reason(job) for job in waiting} == {
        "late": cpu,
        "one": f"{cpu}; 1 job that waits for the same is ahead of it",
        "two": f"{cpu}; 2 jobs that wait for the same are ahead of it",
        "gpu": "waits for 1 device on a/nvidia:H100-80GB",
    }
    assert WaitingQueue(Plan(), {}).waiting_reason(waiting[0]) == ""


def test_devices_that_the_job_asks_for_come_before_those_of_other_pools(w):
    drained = w.devices("z", 1, pool="right", schedulable=False, reason="node z is drained")
    fleet = [w.devices("a", 1, pool="left"), w.devices("b", 1, pool="left"), drained]
    job = w.job("j", w.want("nvidia", pool="right"))
    [why] = plan(w.snapshot(fleet, [job])).why_not.values()
    assert summary(job, why).startswith("z/nvidia:H100-80GB node z is drained; a/nvidia:H100-80GB is in pool left, but")
