"""Quotas of projects: what they may hold, what they borrow, and who gives it back."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.serialization import to_plain
from orchestrator.core.model import Progress, Project, Since
from orchestrator.core.plan.options.quota import holdings
from orchestrator.core.plan.plan import plan
from orchestrator.core.plan.policies.priced_policies import POLICIES

KIND = "nvidia:H100-80GB"
VISION = Project({"nvidia:H100": 2})


@pytest.fixture
def fleet(w):
    """Of four devices the first are held, one by each of these attempts."""

    def made(jobs, held=(), projects=None, **more):
        node = w.devices("a", 4, free=range(len(held), 4))
        running = [
            w.running(
                job.id,
                (node.id, (n,)),
                priority=job.priority,
                order=job.number,
                spec=job,
                preemptible=job.preemptible,
            )
            for n, job in enumerate(held)
        ]
        return w.snapshot([node], jobs, running, projects=projects or {"vision": VISION}, **more)

    return made


def jobs(w, number, name="j", **more):
    return [w.job(f"{name}{n}", number=n, **({"project": "vision"} | more)) for n in range(1, number + 1)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_project_that_may_not_borrow_gets_its_quota_and_the_rest_learn_why(w, fleet, policy):
    decided = plan(fleet(jobs(w, 3), policy=policy))
    assert len(decided.start) == 2
    [told] = decided.why_not.values()
    assert told[0, f"a/{KIND}"] == "project vision holds 2 of its 2 nvidia:H100, and the project may not borrow"


def test_attempts_that_run_count_and_so_does_a_job_that_is_too_large_for_what_is_left(w, fleet):
    [big] = [w.job("big", count=2, project="vision")]
    decided = plan(fleet([big], jobs(w, 1, "r")))
    why = "project vision holds 1 of its 2 nvidia:H100, but the job needs 2, and the project may not borrow"
    assert not decided.start and decided.why_not["big"][0, f"a/{KIND}"] == why


def test_a_range_takes_no_more_than_the_quota_leaves(w, fleet):
    ranged = w.job("ranged", w.want("nvidia:H100", count=4, min_count=1), objective="throughput", project="vision")
    [start] = plan(fleet([ranged])).start
    assert [len(numbers) for _, numbers in start.allocation] == [2]


@pytest.mark.parametrize("policy", POLICIES)
def test_borrowers_come_after_all_others_whatever_their_priority(w, fleet, policy):
    borrows = {"vision": replace(VISION, borrow=True)}
    running = jobs(w, 3, "r", priority=9)
    seen = fleet([*jobs(w, 1, priority=9), *jobs(w, 1, "other", project="")], running, borrows, policy=policy)
    assert [s.job for s in plan(seen).start] == ["other1"]
    assert [s.job for s in plan(replace(seen, jobs=seen.jobs[:1])).start] == ["j1"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_within_its_quota_gets_back_what_was_borrowed_newest_first_and_a_borrower_stops_nobody(w, fleet, policy):
    projects = {"vision": replace(VISION, borrow=True), "speech": Project({"nvidia": 1})}
    held = jobs(w, 4, "r", priority=5)
    owner = w.job("own", number=9, project="speech")
    decided = plan(fleet([owner], held, projects, policy=policy))
    assert [(p.victim, p.job) for p in decided.preempt] == [("r4", "own")]
    assert "waits for r4 to save and stop" in decided.why_not["own"][0, ""]
    for nobody in (replace(owner, project=""), replace(owner, project="vision", priority=9)):
        assert not plan(fleet([nobody], [replace(r, priority=9) for r in held], projects, policy=policy)).preempt


def test_a_start_that_borrows_says_so(w, fleet):
    borrows = {"vision": replace(VISION, borrow=True)}
    [first, second, third] = plan(fleet(jobs(w, 3), projects=borrows)).start
    assert "borrows" not in first.reason + second.reason
    told = "; borrows 1 beyond the 2 nvidia:H100 of project vision: other projects may reclaim them"
    assert third.reason.endswith(told)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_that_may_not_be_stopped_does_not_borrow_since_it_could_not_give_back(w, fleet, policy):
    borrows = {"vision": replace(VISION, borrow=True)}
    pinned = jobs(w, 3, "pinned", preemptible=False)
    borrower = w.job("borrower", number=9, project="vision")
    decided = plan(fleet([*pinned, borrower], projects=borrows, policy=policy))
    assert sorted(start.job for start in decided.start) == ["borrower", "pinned1", "pinned2"]
    why = "project vision holds 2 of its 2 nvidia:H100, and a job with preemptible: false may not borrow"
    assert why in decided.why_not["pinned3"][0, f"a/{KIND}"]


def test_of_a_project_beyond_its_quota_those_that_may_be_stopped_are_the_borrowers(w, fleet):
    projects = {"vision": replace(VISION, borrow=True), "speech": Project({"nvidia": 1})}
    held = [*jobs(w, 1, "pinned", preemptible=False), *jobs(w, 2, "r", priority=5), w.job("other", priority=9)]
    decided = plan(fleet([w.job("own", number=9, project="speech")], held, projects))
    assert [(p.victim, p.job) for p in decided.preempt] == [("r2", "own")]
    full = plan(fleet([w.job("own", number=9, project="speech")], jobs(w, 4, "pinned", preemptible=False), projects))
    assert full.preempt == ()


@pytest.mark.parametrize("borrow", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_of_higher_priority_takes_the_quota_of_a_lower_one_of_its_project(w, fleet, policy, borrow):
    projects = {"vision": replace(VISION, borrow=borrow)}
    held = [*jobs(w, 2, "r"), *jobs(w, 2, "other", project="", priority=9)]
    decided = plan(fleet(jobs(w, 1, priority=5), held, projects, policy=policy))
    assert [(p.victim, p.job) for p in decided.preempt] == [("r2", "j1")]
    assert not plan(fleet(jobs(w, 1), held, projects, policy=policy)).preempt, "an equal waits"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("running", "stop"), [(2, []), (3, ["r2", "r3"])])
def test_a_job_larger_than_the_quota_stops_no_attempt_within_it(w, fleet, policy, running, stop):
    """The attempt would come first again, because it does not borrow, and would be stopped again."""
    one = {"vision": Project({"nvidia:H100": 1}, borrow=True)}
    held = [*jobs(w, running, "r"), *jobs(w, 4 - running, "other", project="", priority=9)]
    big = w.job("big", count=2, priority=5, number=9, project="vision")
    decided = plan(fleet([big], held, one, policy=policy))
    assert (sorted(p.victim for p in decided.preempt), decided.start) == (stop, ())


@pytest.mark.parametrize("policy", POLICIES)
def test_attempts_of_lower_priority_leave_a_job_its_quota_and_become_the_borrowers(w, fleet, policy):
    projects = {"vision": replace(VISION, borrow=True)}
    decided = plan(fleet(jobs(w, 1, count=2, priority=5), jobs(w, 2, "r"), projects, policy=policy))
    assert ([s.job for s in decided.start], decided.preempt) == (["j1"], ())
    assert "borrows" not in decided.start[0].reason
    last = w.job("last", number=9, priority=5, project="vision")
    after = plan(fleet([last], [*jobs(w, 2, "r"), *jobs(w, 2, "j", priority=5)], projects, policy=policy))
    assert [p.victim for p in after.preempt] == ["r2"], "no quota is left, so it takes the place of a borrower"
    why = "project vision holds 4 nvidia:H100; 2 of them count against its quota of 2 for a job of this priority"
    assert after.why_not["last"][0, f"a/{KIND}"] == why


@pytest.mark.parametrize("policy", POLICIES)
def test_a_borrower_leaves_the_quota_to_attempts_after_it(w, policy):
    """The large attempt comes first, but does not fit into the quota; the small one does."""
    node = w.devices("a", 4, free=())
    large, small = w.job("large", count=3, number=1, project="vision"), w.job("small", number=2, project="vision")
    running = [w.running("large", (node.id, (0, 1, 2)), order=1, spec=large)]
    running += [w.running("small", (node.id, (3,)), order=2, spec=small)]
    projects = {"vision": replace(VISION, borrow=True), "speech": Project({"nvidia": 1})}
    owner = w.job("own", number=9, project="speech")
    decided = plan(w.snapshot([node], [owner], running, projects=projects, policy=policy))
    assert [(p.victim, p.job) for p in decided.preempt] == [("large", "own")]


def test_only_the_job_for_which_others_of_its_project_stop_is_said_to_wait_for_them(w, fleet):
    projects = {"vision": replace(VISION, borrow=True)}
    held = [*jobs(w, 1, "r"), *jobs(w, 3, "other", project="", priority=9)]
    decided = plan(fleet(jobs(w, 3, priority=5), held, projects))
    waiting = [job for job, told in decided.why_not.items() if "waits for r1" in str(told)]
    assert waiting == [p.job for p in decided.preempt] == ["j1"]


def test_it_does_so_too_where_devices_are_free_but_no_quota_is_left_to_a_project_that_may_not_borrow(w, fleet):
    held = jobs(w, 2, "r")
    seen = fleet(jobs(w, 1, priority=5), held)
    decided = plan(seen)
    assert not decided.start and [p.victim for p in decided.preempt] == ["r2"]
    assert decided.why_not["j1"][0, ""] == "waits for r2 of lower priority to save and stop on a/nvidia:H100-80GB"
    again = replace(seen, running=(seen.running[0], replace(seen.running[1], stopping=True)))
    assert not plan(again).preempt, "one is enough"
    assert plan(fleet(jobs(w, 1, priority=5), held, {"vision": replace(VISION, borrow=True)})).start


def test_the_quota_may_be_held_on_other_nodes_than_those_that_are_wanted(w, fleet):
    held = jobs(w, 2, "r")
    seen = fleet([], held)
    b = w.devices("b", 1, pool="far")
    wants = w.job("j1", w.want("nvidia:H100", pool="far"), number=9, priority=5, project="vision")
    decided = plan(replace(seen, devices=(*seen.devices, b), jobs=(wants,)))
    assert [p.victim for p in decided.preempt] == ["r2"]
    why = "waits for r2 of lower priority, which hold the quota of its project, to save and stop on b/nvidia:H100-80GB"
    assert decided.why_not["j1"][0, ""] == why


@pytest.mark.parametrize("policy", POLICIES)
def test_a_borrower_makes_room_for_whom_nobody_limits_at_its_own_priority(w, fleet, policy):
    projects = {"vision": replace(VISION, borrow=True), "cpus": Project({"cpu": 1})}
    held = jobs(w, 4, "r")
    for project in ("", "cpus"):
        [wants] = [w.job("j", number=9, project=project)]
        assert [p.victim for p in plan(fleet([wants], held, projects, policy=policy)).preempt] == ["r4"]
        lower = replace(wants, priority=-1)
        assert not plan(fleet([lower], held, projects, policy=policy)).preempt
    within = plan(fleet([wants], held[:2], projects, policy=policy))
    assert not within.preempt and within.start


def test_the_most_urgent_attempts_of_a_project_are_those_within_its_quota(w, fleet):
    projects = {"vision": replace(VISION, borrow=True)}
    held = [w.job(f"r{n}", number=n, priority=n, project="vision") for n in range(1, 5)]
    wants = w.job("j", number=9, priority=4)
    assert [p.victim for p in plan(fleet([wants], held, projects)).preempt] == ["r1"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_gang_that_waits_for_quota_is_not_overtaken_by_small_jobs_of_its_project(w, fleet, policy):
    gang = w.job("gang", number=2, count=2, project="vision")
    [small] = [w.job("small", number=3, project="vision")]
    other = w.job("other", number=4)
    seen = fleet([gang, small, other], jobs(w, 1, "r"), policy="fifo")
    decided = plan(seen)
    assert [s.job for s in decided.start] == ["other"], "devices are not kept, only quota"
    told = (
        "project vision holds 1 of its 2 nvidia:H100 (2 more reserved for gang, which is ahead in the queue), "
        "and the project may not borrow"
    )
    assert decided.why_not["small"][0, f"a/{KIND}"] == told
    assert plan(replace(seen, jobs=(small, other))).start[0].job == "small"
    too_big = w.job("gang", number=2, count=3, project="vision")
    assert "small" in [s.job for s in plan(replace(seen, jobs=(too_big, small))).start]
    assert not plan(replace(seen, policy=policy)).preempt


def test_a_running_job_of_a_full_project_moves_and_grows_within_its_quota(w):
    far = Progress(step=100, of=10_100, rates={("cpu", 1): 1.0, ("tpu:v5e", 1): 10.0}, starts_s=30.0)
    job = w.job("slow", w.want("cpu"), w.want("tpu"), number=1, project="vision")
    running = w.running("slow", ("a/cpu", (0,)), spec=job, saves=True)
    seen = w.snapshot([w.cpu("a", 1, free=()), w.v5e("t", 1)], [], [running], policy="finish_time")
    seen = replace(seen, since={"slow": Since(-9999.0, -9999.0)}, progress={"slow": far})
    assert plan(replace(seen, projects={"vision": Project({"cpu": 1, "tpu": 1})}), full=True).preempt
    assert not plan(replace(seen, projects={"vision": Project({"cpu": 1, "tpu": 0})}), full=True).preempt


@pytest.mark.parametrize(("quota", "grows"), [(1, False), (2, True)])
def test_what_a_job_holds_counts_for_its_own_move(w, quota, grows):
    rates = Progress(step=100, of=10_100, rates={("cpu", 1): 1.0, ("cpu", 2): 2.0}, starts_s=30.0)
    job = w.job("slow", w.want("cpu", count=2, min_count=1), number=1, project="vision")
    running = w.running("slow", ("a/cpu", (0,)), spec=job, saves=True)
    other = w.job("small", w.want("cpu"), number=2, project="vision")
    seen = w.snapshot([w.cpu("a", 4, free=(1, 2, 3))], [], [running], policy="finish_time")
    seen = replace(seen, since={"slow": Since(-9999.0, -9999.0)}, progress={"slow": rates})
    seen = replace(seen, projects={"vision": Project({"cpu": quota})})
    decided = plan(seen, full=True)
    assert [p.victim for p in decided.preempt] == (["slow"] if grows else [])
    if grows:  # while it saves, nobody of its project takes what it needs beside
        stopping = replace(seen, running=(replace(running, stopping=True),), jobs=(other,), memory=decided.memory)
        assert not plan(stopping).start


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2), st.sampled_from(["vision", "speech", ""])), max_size=8),
    st.integers(0, 4),
    st.integers(0, 4),
    st.sampled_from(POLICIES),
)
def test_a_project_that_may_not_borrow_never_holds_more_than_its_quota(w, wanted, quota, held, policy):
    nodes = [w.devices("a", 4, free=range(held, 4)), w.devices("b", 3)]
    asked = [
        w.job(f"j{n}", w.want("nvidia", count=count, min_count=1), number=n, priority=priority, project=project)
        for n, (count, priority, project) in enumerate(wanted, 1)
    ]
    runs = w.job("r", project="vision")
    running = [w.running("r", (nodes[0].id, tuple(range(held))), spec=runs)] if held else []
    seen = w.snapshot(nodes, asked, running, policy=policy)
    limited = replace(
        seen, projects={"vision": Project({"nvidia:H100": quota}), "speech": Project({"nvidia": 1}, True)}
    )
    taken: Counter[str] = Counter({"vision": held})
    decided = plan(limited, full=True)
    of = {job.id: job.project for job in asked}
    for start in decided.start:
        taken[of[start.job]] += sum(len(numbers) for _, numbers in start.allocation)
    assert taken["vision"] <= max(quota, held)
    assert len({start.job for start in decided.start}) == len(decided.start)
    assert plan(replace(seen, projects={"none": VISION}), full=True) == plan(seen, full=True)


def test_what_projects_hold_and_borrow_is_told_by_kind(w, fleet):
    projects = {"vision": replace(VISION, borrow=True), "free": Project(), "speech": Project({"nvidia": 9, "cpu": 1})}
    seen = fleet([], [*jobs(w, 3, "r"), w.job("s", number=4, project="speech")], projects)
    assert [tuple(to_plain(row).values()) for row in holdings(projects, seen.running)] == [
        ("free", "", None, None, 0, False),
        ("speech", "nvidia", 9, 1, 0, False),
        ("speech", "cpu", 1, 0, 0, False),
        ("vision", "nvidia:H100", 2, 3, 1, True),
    ]
