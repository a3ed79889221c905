import json
from dataclasses import replace

from cluster.serialization import to_plain
from orchestrator.core.explanation.explain import CandidateExplanation, Explanation, explain, impossible_reason
from orchestrator.core.model import Start
from orchestrator.core.plan.policies import plugins
from orchestrator.core.states import State


def test_a_kind_no_pool_has_is_named_with_the_kinds_that_are_here(w):
    assert impossible_reason(w.job("j", w.want("tpu:v5p")), [w.cpu(), w.xla()]) == (
        "no pool has tpu:v5p; kinds here: cpu, tpu:emulated"
    )
    assert impossible_reason(w.job("j", w.want("nvidia:H200", "amd:MI300X")), []) == (
        "no pool has nvidia:H200 or amd:MI300X; kinds here: none"
    )
    assert impossible_reason(w.job("j", w.want("tpu:v5p", pool="cpu")), [w.cpu(), w.xla()]) == (
        "pool cpu has no tpu:v5p; kinds here: cpu"
    )


def test_a_pool_that_is_not_here_is_named_with_the_nearest(w):
    assert impossible_reason(w.job("j", w.want("any", pool="xlaa")), [w.cpu(), w.xla()]) == (
        "no pool is called xlaa; did you mean 'xla'? valid: cpu, xla"
    )


def test_too_much_for_every_node_says_what_each_has(w):
    fleet = [w.devices("a", 4), w.devices("b", 2)]
    assert impossible_reason(w.job("j", w.want(count=8)), fleet) == (
        "a/nvidia:H100-80GB: has 4 devices in all, but the job needs 8; "
        "b/nvidia:H100-80GB: has 2 devices in all, but the job needs 8"
    )


def test_a_gang_larger_than_any_island_can_never_run(w):
    fleet = [w.devices("a", 4), w.devices("b", 4), w.devices("c", 4, pool="other")]
    assert impossible_reason(w.job("j", w.want(count=4, nodes=3)), fleet) == (
        "the job needs 3 nodes of one pool and kind, each with 4 devices; pool h100 has 2 (nvidia:H100-80GB)"
    )


def test_an_emulated_device_asked_for_by_its_backend_says_how_to_ask(w):
    assert impossible_reason(w.job("j", w.want("tpu")), [w.xla()]) == (
        "xla-0/tpu:emulated: is emulated on the CPU; request tpu:emulated or pool xla to use it"
    )


def test_one_possible_candidate_is_enough_and_busy_or_lost_nodes_count(w):
    job = w.job("j", w.want("tpu:v5p"), w.want("cpu"))
    assert impossible_reason(job, [w.cpu(free=(), schedulable=False)]) == ""
    assert impossible_reason(job, [w.xla()]) == (
        "candidate 1: no pool has tpu:v5p; kinds here: tpu:emulated; "
        "candidate 2: no pool has cpu; kinds here: tpu:emulated"
    )


def test_a_job_that_would_start_is_told_where_and_what_else_would_do(w):
    fleet = [w.cpu(), w.devices("a", 2), w.devices("b", 2, free=())]
    job = w.job("new", w.want("nvidia"), w.want("cpu"), ordered=True)
    assert explain(job, w.snapshot(fleet, [])) == Explanation(
        (
            CandidateExplanation(
                0,
                ("nvidia",),
                1,
                1,
                1,
                "",
                ("a/nvidia:H100-80GB",),
                {
                    "b/nvidia:H100-80GB": "has 0 of 2 devices free, but the job needs 1",
                    "cpu-0/cpu": "is of kind cpu, but the job accepts nvidia",
                },
            ),
            CandidateExplanation(
                1,
                ("cpu",),
                1,
                1,
                1,
                "",
                ("cpu-0/cpu",),
                {
                    "a/nvidia:H100-80GB": "is of kind nvidia:H100-80GB, but the job accepts cpu",
                    "b/nvidia:H100-80GB": "is of kind nvidia:H100-80GB, but the job accepts cpu",
                },
            ),
        ),
        Start(
            "new",
            0,
            (("a/nvidia:H100-80GB", (0,)),),
            "candidate 1 of 2: nvidia:H100-80GB in pool h100, the tightest fit",
        ),
        (),
        "",
        policy="priority",
    )


def test_the_policy_that_orders_the_job_is_named_waiting_or_running(w):
    node, job = w.devices("a", 1, free=()), w.job("j")
    runs = w.snapshot([node], [], [w.running("j", (node.id, (0,)))], policy="cost")
    for snapshot in (runs, w.snapshot([node], [job], policy="cost")):
        explained = explain(replace(job, state=State.RUNNING) if snapshot.running else job, snapshot)
        assert (explained.policy, explained.policy_fault) == ("cost", "")


def test_an_installed_policy_that_fails_is_named_with_its_fault(w, monkeypatch):
    def fails(_input):
        raise KeyError("x")

    monkeypatch.setitem(plugins.INSTALLED, "theirs", fails)
    explained = explain(w.job("j", w.want("cpu")), w.snapshot([w.cpu()], [], policy="theirs"))
    assert (explained.policy, explained.policy_fault) == ("theirs", "policy 'theirs' raised KeyError: 'x'")


def test_a_job_is_explained_in_its_place_in_the_line(w):
    ahead, job = w.job("ahead", priority=1), w.job("j")
    fleet = [w.devices("a", 1)]
    told = explain(job, w.snapshot(fleet, [ahead, job]))
    assert told.would_start is None
    assert told.candidates[0].fits == ()
    assert told.candidates[0].refused == {
        "a/nvidia:H100-80GB": "has 0 of 1 device free, but the job needs 1",
        "": "waits for 1 device on a/nvidia:H100-80GB",
    }


def test_a_running_job_is_explained_as_if_it_were_asked_for_now(w):
    node = w.devices("a", 2, free=(1,))
    job = replace(w.job("j"), state=State.RUNNING)
    assert explain(job, w.snapshot([node], [job])).would_start.allocation == ((node.id, (1,)),)


def test_a_job_that_holds_its_devices_runs_there_and_its_own_are_no_reason_against_them(w):
    node, other = w.devices("a", 1, free=()), w.devices("b", 1, free=())
    job = replace(w.job("j"), state=State.RUNNING)
    attempts = [w.running("j", (node.id, (0,))), w.running("k", (other.id, (0,)))]
    told = explain(job, w.snapshot([node, other], [w.job("waits", priority=9)], attempts))
    assert told.runs == Start("j", 0, ((node.id, (0,)),))
    assert (told.would_start, told.preempt, told.candidates[0].fits) == (None, (), (node.id,))
    assert told.candidates[0].refused == {other.id: "has 0 of 1 device free, but the job needs 1; held by k"}
    ended = explain(replace(job, state=State.SUCCEEDED), w.snapshot([node, other], [], attempts))
    assert ended.runs is None and ended.candidates[0].fits == ()


def test_those_who_would_have_to_stop_are_named(w):
    node = w.devices("a", 1, free=())
    told = explain(w.job("j", priority=3), w.snapshot([node], [], [w.running("low", (node.id, (0,)))]))
    assert (told.would_start, told.preempt) == (None, ("low",))


def test_what_can_never_run_says_so_beside_every_refusal(w):
    told = explain(w.job("j", w.want("tpu:v5p")), w.snapshot([w.cpu()], []))
    assert told.impossible == "no pool has tpu:v5p; kinds here: cpu"
    assert told.candidates[0].refused == {"cpu-0/cpu": "is of kind cpu, but the job accepts tpu:v5p"}


def test_an_explanation_is_plain_data(w):
    told = explain(w.job("j"), w.snapshot([w.devices("a", 1)], []))
    assert json.loads(json.dumps(to_plain(told)))["would_start"] == {
        "job": "j",
        "candidate": 0,
        "allocation": [["a/nvidia:H100-80GB", [0]]],
        "reason": "nvidia:H100-80GB in pool h100, the tightest fit",
        "aged": 0,
    }


def test_who_holds_the_devices_is_said_and_many_are_cut(w):
    a, b = w.devices("a", 5, free=()), w.devices("b", 1)
    running = [w.running(f"r{n}", (a.id, (n,))) for n in range(5)]
    far = w.running("far", (b.id, ()))
    job = w.job("j", count=2)
    [told] = explain(job, w.snapshot([a, b], [], [*running, far])).candidates
    assert told.refused[a.id] == "has 0 of 5 devices free, but the job needs 2; held by r0, r1, r2 and 2 more"
    assert told.refused[b.id] == "has 1 device in all, but the job needs 2"
    [one] = explain(w.job("j"), w.snapshot([replace(a, total=1)], [], running[:1])).candidates
    assert one.refused[a.id] == "has 0 of 1 device free, but the job needs 1; held by r0"
