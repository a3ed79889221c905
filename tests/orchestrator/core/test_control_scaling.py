"""An autoscaler that is asked for nodes: what it is told and when, what is said meanwhile, which nodes it gets back."""

from dataclasses import replace

import pytest

from orchestrator.core.controller import messages as m
from orchestrator.core.controller.commands import EndIdleAgent, RequestNodes, RestartAgent, StartAgent, UnwatchAgent
from orchestrator.core.controller.nodes import closed_reason
from orchestrator.core.controller.scaling import NodeGroup
from orchestrator.core.explanation.explain import explain
from orchestrator.core.model import Recovery
from orchestrator.core.step.placement import snapshot
from orchestrator.core.throughput import Throughput

H100 = NodeGroup("h100", "h100", "nvidia", "nvidia:H100-80GB", 8, {"CPU": 96, "GPU": 8}, 2, memory_bytes=80 << 30)
CPU = NodeGroup("cpu", "cpu", "cpu", "cpu", 1, {"CPU": 4}, 3, memory_bytes=80 << 30, start_timeout_s=900.0)
GROUPS = (H100, CPU)
ONE_H100 = {"resources": {"CPU": 96, "GPU": 8}, "label_selector": {"polyfleet.io/pool": "h100"}}
ONE_CPU = {"resources": {"CPU": 4}, "label_selector": {"polyfleet.io/pool": "cpu"}}


class Grows:
    """A controller whose cluster's autoscaler may start these groups. It hears at once what it is asked for."""

    def __init__(self, c, groups=GROUPS):
        self.c, self.groups, self.asked, self.failed = c, groups, [], {}

    def pass_(self, seconds=2.0, hears=(), **more):
        """Time passes, these nodes answer. The commands about agents."""
        found = []
        for _ in range(round(seconds / 2)):
            for node in hears:
                self.c.hear(node)
            _, commands = self.c.tick(2.0, groups=self.groups, **more)
            found += commands
            for command in commands:
                if isinstance(command, RequestNodes):
                    self.asked.append(command.requests)
                    self.c.tell(m.NodeRequestAnswered(failed=self.failed))
        return [command for command in found if isinstance(command, EndIdleAgent | StartAgent | RestartAgent)]

    def why(self, job):
        reasons = self.c.control.plan.why_not[job]
        told = explain(self.c.control.records[job].job, self.seen()).candidates
        assert [answer.refused.get("", "") for answer in told] == [reasons.get((a.candidate, ""), "") for a in told]
        return [reasons[key] for key in sorted(reasons) if not key[1]]

    def seen(self):
        return snapshot(self.c.control, m.Now(self.c.s, self.c.wall_s), Throughput())


@pytest.fixture
def grows(c):
    return Grows(c)


def ends(c, t, job, node):
    c.hear(node, t.ended(job, 1, node=node))
    c.hear(node, there=())


def test_a_job_that_waits_has_a_node_started_and_says_for_how_long(c, w, grows):
    c.submit(w.job("j", w.want("nvidia:H100", count=8)))
    grows.pass_(2)
    assert grows.asked == [(ONE_H100,)]
    grows.pass_(80)
    assert grows.why("j") == ["a node of kind nvidia:H100-80GB is being started in pool h100 (1 m 20 s so far)"]
    assert grows.asked == [(ONE_H100,)] * 3, "asked again every 30 s: a head may forget"
    c.node("new", 8, "nvidia:H100-80GB", "h100")
    grows.pass_(2)
    assert c.state("j") == "STARTING" and c.control.scaling.pending == {}


def test_a_cluster_whose_pools_do_not_grow_is_never_asked_for_anything(c, w):
    fixed = Grows(c, ())
    c.submit(w.job("j", w.want("nvidia:H100", count=8)))
    fixed.pass_(100)
    assert fixed.asked == []


def test_what_is_asked_for_falls_with_the_queue_and_is_taken_back_with_the_groups(c, w, grows):
    c.submit(w.job("j", w.want("cpu")))
    grows.pass_(2)
    c.tell(m.CancelRequested("j"))
    grows.pass_(2)
    assert grows.asked == [(ONE_CPU,), ()]
    c.submit(w.job("k", w.want("cpu")))
    grows.pass_(2)
    grows.groups = ()
    grows.pass_(100)
    assert grows.asked == [(ONE_CPU,), (), (ONE_CPU,), ()], "and nothing is asked from then on"


def test_a_head_that_is_back_is_told_again_at_once(c, w, grows):
    c.submit(w.job("j", w.want("cpu")))
    grows.pass_(4)
    c.tell(m.ClusterLeft())
    c.tell(m.ClusterJoined())
    grows.pass_(2)
    assert grows.asked == [(ONE_CPU,)] * 2


def test_a_question_that_was_not_heard_is_asked_again_after_a_pause(c, w):
    c.submit(w.job("j", w.want("cpu")))
    _, commands = c.tick(2.0, groups=GROUPS)
    assert RequestNodes((ONE_CPU,)) in commands
    c.tell(m.NodeRequestAnswered("no answer within 10 s"))
    assert RequestNodes((ONE_CPU,)) not in c.tick(2.0, groups=GROUPS)[1]
    assert RequestNodes((ONE_CPU,)) in c.tick(4.0, groups=GROUPS)[1]


def test_nodes_that_do_not_come_leave_the_job_to_its_next_candidate_for_a_while(c, w, grows):
    c.submit(w.job("j", w.want("nvidia:H100", count=8), w.want("cpu"), ordered=True))
    grows.pass_(500)
    assert grows.asked[-1] == (ONE_H100,)
    grows.failed = {"h100": "InsufficientInstanceCapacity"}
    grows.pass_(106)
    assert grows.asked[-1] == (ONE_CPU,)
    why = "no node came within 10 m (InsufficientInstanceCapacity)"
    gone, started = grows.why("j")
    assert gone.startswith(f"pool h100 is unavailable: {why}; the next try is in 9 m")
    assert started.startswith("a node of kind cpu is being started in pool cpu (")
    grows.pass_(600)
    assert grows.asked[-1] == (ONE_H100,), "then the first candidate has its turn again"


def test_a_node_that_comes_without_an_agent_does_not_count_as_come(c, w, grows):
    c.submit(w.job("j", w.want("nvidia:H100", count=8)))
    grows.pass_(300)
    c.tell(m.NodesListed((m.ListedNode("ray-new", "new", pool="h100"),)))
    grows.pass_(304)
    assert grows.why("j")[0].startswith("pool h100 is unavailable: no node came within 10 m")


def test_each_node_of_a_gang_that_comes_gives_the_others_time(c, w, grows):
    c.submit(w.job("g", w.want("nvidia:H100", count=8, nodes=2)))
    grows.pass_(500)
    c.node("first", 8, "nvidia:H100-80GB", "h100")
    grows.pass_(500, hears=["first"])
    assert grows.why("g")[0].startswith(
        "a node of kind nvidia:H100-80GB is being started in pool h100 (8 m 18 s so far)"
    )
    assert not c.control.nodes["first"].resting, "nor is it given back while the gang waits"


def test_time_that_the_server_slept_is_no_time_that_a_node_took(c, w, grows):
    c.submit(w.job("j", w.want("cpu")))
    grows.pass_(20)
    c.tell(m.Tick(groups=GROUPS), after_s=2000.0)
    assert grows.why("j") == ["a node of kind cpu is being started in pool cpu (19 s so far)"]


def test_an_idle_node_rests_after_its_time_and_was_given_back_when_it_leaves(c, w, t, grows):
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    assert grows.pass_(400, hears=["a"]) == []
    ends(c, t, "j", "a")
    assert EndIdleAgent("a", "ray-a") not in grows.pass_(298, hears=["a"])
    assert EndIdleAgent("a", "ray-a") in grows.pass_(4, hears=["a"])
    assert closed_reason(c.control.nodes["a"], {}, c.s).startswith("node a is resting: nothing used it")
    assert grows.pass_(50) == [], "no agent is made there, and its silence is nothing"
    assert c.tell(m.NodesListed(()))[1] == [UnwatchAgent("a", "ray-a")]
    assert "a" not in c.control.nodes


def test_an_agent_that_could_not_be_ended_is_ended_again(c, grows):
    c.node("a")
    grows.pass_(302, hears=["a"])
    assert grows.pass_(64) == [EndIdleAgent("a", "ray-a")]


def test_a_node_whose_agent_was_just_asked_for_something_does_not_rest(c, grows):
    c.node("a")
    began_s = c.s
    assert grows.pass_(400, hears=["a"], agent_called_s={"a": began_s + 200.0}) == []
    assert grows.pass_(120, hears=["a"], agent_called_s={"a": began_s + 200.0}) == [EndIdleAgent("a", "ray-a")]


def test_a_node_whose_checkpoints_are_not_all_in_the_object_store_does_not_rest(c, grows):
    c.node("a")
    told = c.control.nodes["a"].facts
    c.hear("a", facts=replace(told, pending_uploads=1))
    assert grows.pass_(1000, hears=["a"]) == []
    c.hear("a", facts=replace(told, pending_uploads=0))
    assert grows.pass_(290, hears=["a"]) == [], "its time begins when the last one is there"
    assert grows.pass_(20, hears=["a"]) == [EndIdleAgent("a", "ray-a")]


def test_nodes_that_the_autoscaler_keeps_in_any_case_keep_their_agents(c):
    kept = Grows(c, (NodeGroup("cpu", "cpu", "cpu", "cpu", 1, {"CPU": 4}, 3, min_nodes=1),))
    c.node("a")
    c.node("b")
    assert kept.pass_(320, hears=["a", "b"]) == [EndIdleAgent("a", "ray-a")]


def test_a_job_that_waits_for_its_lost_node_has_no_other_started(c, w, grows):
    c.node("a")
    c.run(w.job("j", w.want("cpu"), recovery=Recovery(on_disconnect="wait")))
    grows.pass_(2, hears=["a"])
    c.tell(m.NodesListed(()))
    grows.pass_(1000)
    assert grows.asked[-1] == () and c.control.scaling.unavailable == {}


def test_nodes_of_pools_that_do_not_grow_never_rest(c, grows):
    c.node("a", pool="others")
    assert grows.pass_(1000, hears=["a"]) == []


def test_a_resting_node_is_woken_before_another_is_started(c, w, grows):
    c.node("a")
    grows.pass_(302, hears=["a"])
    c.submit(w.job("j", w.want("cpu")))
    assert grows.pass_(2) == [StartAgent("a", "ray-a")]
    assert grows.asked[-1] == (ONE_CPU,), "one node in all, which is there"
    c.tell(m.AgentStarted("a", "ray-a"))
    c.hear("a", facts=c.control.nodes["a"].facts)
    c.hear("a")
    grows.pass_(2)
    assert c.state("j") == "STARTING"


def test_a_job_that_names_a_resting_node_wakes_it_and_so_does_its_user(c, w, grows):
    for name in ("a", "b", "c"):
        c.node(name)
    grows.pass_(302, hears=["a", "b", "c"])
    c.submit(w.job("j", w.want("cpu", node="b")))
    assert grows.pass_(2) == [StartAgent("b", "ray-b")]
    assert c.tell(m.ResumeRequested("c"))[1] == [StartAgent("c", "ray-c")]


def test_a_job_that_a_node_could_run_which_may_be_started_is_not_refused(c, w, grows):
    c.node("a")
    stop = Recovery(on_disconnect="stop")
    c.submit(w.job("j", w.want("nvidia:H100", count=8), recovery=stop))
    c.submit(w.job("k", w.want("nvidia:H100", count=9), recovery=stop))
    grows.pass_(4, hears=["a"])
    assert (c.state("j"), c.state("k")) == ("PENDING", "")


def test_a_job_that_no_node_to_be_started_would_run_says_so_and_one_that_has_to_wait_its_turn_too(c, w, t, grows):
    grows.groups = (H100,)
    for name in ("a", "b"):
        c.node(name, 8, "nvidia:H100-80GB", "h100")
        c.run(w.job(name, count=8))
    c.submit(w.job("later", count=8))
    c.submit(w.job("never", w.want("tpu")))
    grows.pass_(2, hears=["a", "b"])
    assert grows.why("later")[0].startswith("pool h100 has its maximum of 2 nodes; waits for 8 devices on ")
    assert grows.why("never") == ["no node that an autoscaler may start can run the job: h100 can grow"]
