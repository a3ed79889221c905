"""Copies of checkpoints on other machines: of which, to which machine, and when."""

from dataclasses import replace

import pytest

from orchestrator.core.controller import messages as m
from orchestrator.core.controller.commands import Launch, Replicate
from orchestrator.core.controller.nodes import Node
from orchestrator.core.jobs.fold import Record
from orchestrator.core.step.checkpoint_replication import choose_node
from workers.protocol.messages import RankEvent

GiB = 2**30


def node(t, name, pool="far", storage="", host="", free_gib=9):
    told = t.facts(name, pool=pool)
    more = {"storage_id": storage or name, "host": host or name, "disk_free_bytes": free_gib * GiB}
    return Node(name, f"ray-{name}", 0.0, replace(told, **more))


def chosen(w, source, *others, replicas=(), size_gib=1, failed=""):
    point = {"pool": "far", "path": "j/step-2", "node": source.name, "step": 2, "bytes": size_gib * GiB}
    record = Record(w.job("j", replicas=1), checkpoint=point, replicas=replicas)
    return choose_node(record, source, (source, *others), others, failed)


def test_a_machine_of_the_same_pool_takes_the_copy_before_one_with_more_room(w, t):
    others = node(t, "b", free_gib=4), node(t, "x", "other", free_gib=90)
    assert chosen(w, node(t, "a"), *others) == ("b", "")
    assert chosen(w, node(t, "a"), others[1]) == ("x", "")


def test_copies_stay_on_one_machine_as_long_as_it_takes_them(w, t):
    had = ({"pool": "far", "path": "j/step-1", "step": 1, "node": "b"},)
    others = node(t, "b", free_gib=4), node(t, "c", free_gib=90)
    assert chosen(w, node(t, "a"), *others)[0] == "c"
    assert chosen(w, node(t, "a"), *others, replicas=had)[0] == "b"
    assert chosen(w, node(t, "a"), *others, replicas=had, failed="b")[0] == "c"


def test_a_second_copy_goes_to_another_storage_than_the_first(w, t):
    had = ({"pool": "far", "path": "j/step-2", "step": 2, "node": "b"},)
    others = node(t, "b"), node(t, "b2", storage="b", free_gib=90), node(t, "c")
    assert chosen(w, node(t, "a"), *others, replicas=had) == ("c", "")


def test_where_machines_share_the_storage_no_copy_is_made_and_that_is_said(w, t):
    said = "no copy is made: b and a share the checkpoint's storage"
    assert chosen(w, node(t, "a"), node(t, "b", storage="a"), node(t, "c")) == ("", said)


def test_another_storage_of_the_same_machine_is_no_place_for_a_copy(w, t):
    beside = node(t, "a2", "other", host="a")
    assert chosen(w, node(t, "a"), beside) == ("", "no other machine with its own storage is available for a copy")


def test_machines_without_room_are_named(w, t):
    why = "no other machine has enough disk space for a copy: it needs 9.0 GiB, node c has 6 GiB free"
    assert chosen(w, node(t, "a"), node(t, "b", free_gib=3), node(t, "c", free_gib=6), size_gib=8) == ("", why)


@pytest.fixture
def pair(c, w, t):
    """A training on a, with a second machine beside it."""
    for name in "ab":
        c.node(name)
        c.hear(name, facts=node(t, name, "cpu").facts)
    c.run(w.job("j", w.want("cpu", node="a"), replicas=1, keep_checkpoints=2))
    return c


def saved(c, t, step):
    data = {"step": step, "path": f"/store/j/step-{step}", "bytes": 1 << 20}
    c.hear("a", t.report("j", 1, 0, "running", RankEvent("checkpoint", 0, c.s, step, data), cursor=step))


def copies(told):
    return [command for command in told[1] if isinstance(command, Replicate)]


def test_the_newest_checkpoint_is_copied_one_at_a_time_and_for_half_of_the_time_at_most(pair, t):
    saved(pair, t, 1)
    assert copies(pair.tick(1.0)) == [Replicate("j", 1, "a", "cpu", "j/step-1", "b", 2)]
    saved(pair, t, 2)
    saved(pair, t, 3)
    pair.hear("b")
    assert copies(pair.tick(4.0)) == []
    told, _ = pair.tell(m.Replicated("j", 1, "b", "j/step-1"))
    assert told == [("j", "replicated", 1)]
    pair.hear("a"), pair.hear("b")
    assert copies(pair.tick(3.0)) == []
    assert [copy.step for copy in copies(pair.tick(3.0))] == [3]
    pair.tell(m.Replicated("j", 3, "b", "j/step-3"))
    [replica] = pair.control.records["j"].replicas
    assert (replica["step"], replica["node"], replica["pool"]) == (3, "b", "cpu")
    pair.hear("a"), pair.hear("b")
    assert copies(pair.tick(5.0)) == []


def test_a_copy_that_fails_is_told_once_tried_again_later_and_fails_no_job(pair, t):
    saved(pair, t, 1)
    pair.tick(1.0)
    assert pair.tell(m.Replicated("j", 1, "b", error="no space"))[0] == [("j", "unreplicated", 1)]
    for _ in range(3):
        pair.hear("a"), pair.hear("b")
        assert copies(pair.tick(3.0)) == []
    pair.hear("a"), pair.hear("b")
    assert len(copies(pair.tick(3.0))) == 1
    assert pair.tell(m.Replicated("j", 1, "b", error="no space"))[0] == []
    assert pair.control.records["j"].unreplicated == "step 1 could not be copied to b: no space"
    assert pair.state("j") == "RUNNING"


def test_an_answer_about_another_copy_than_the_one_on_its_way_says_nothing(pair, t):
    saved(pair, t, 1)
    pair.tick(1.0)
    assert pair.tell(m.Replicated("j", 7, "b", "j/step-7"))[0] == []
    assert pair.tell(m.Replicated("gone", 1, "b", "gone/step-1"))[0] == []


def test_a_launch_is_told_where_copies_lie(pair, t, w):
    saved(pair, t, 1)
    pair.tick(1.0)
    pair.tell(m.Replicated("j", 1, "b", "j/step-1"))
    pair.hear("a", t.ended("j", 1, state="failed", kind="lost", message="lost"))
    _, commands = pair.tick(5.0)
    [launch] = [command for command in commands if isinstance(command, Launch)]
    assert launch.replicas == ({"pool": "cpu", "path": "j/step-1", "step": 1, "node": "b"},)


def finished(c, t):
    """The job has ended, and its devices were released: which copies are made then."""
    c.hear("a", t.ended("j", 1))
    begun = copies(c.tick(0.1))
    assert "j" not in c.control.records
    return begun


def test_the_last_checkpoint_of_a_job_is_copied_after_it_has_ended_and_only_that(pair, t):
    saved(pair, t, 1)
    pair.tick(1.0)
    saved(pair, t, 2)
    saved(pair, t, 3)
    finished(pair, t)
    assert pair.tell(m.Replicated("j", 1, "b", "j/step-1"))[0] == [("j", "replicated", 1)]
    pair.hear("a"), pair.hear("b")
    assert [copy.step for copy in copies(pair.tick(3.0))] == [3]
    assert pair.tell(m.Replicated("j", 3, "b", "j/step-3"))[0] == [("j", "replicated", 1)]
    assert (pair.control.uncopied, pair.control.copies) == ({}, {})
    pair.hear("a"), pair.hear("b")
    assert copies(pair.tick(3.0)) == []


def test_a_job_that_ended_with_all_its_copies_made_is_forgotten(pair, t):
    saved(pair, t, 1)
    pair.tick(1.0)
    pair.tell(m.Replicated("j", 1, "b", "j/step-1"))
    finished(pair, t)
    assert (pair.control.uncopied, pair.control.copies) == ({}, {})


def test_a_copy_that_fails_after_the_end_is_tried_again_and_given_up_within_an_hour(pair, t):
    saved(pair, t, 1)
    assert [copy.step for copy in finished(pair, t)] == [1]
    assert pair.tell(m.Replicated("j", 1, "b", error="no space"))[0] == [("j", "unreplicated", 1)]
    again = []
    while not again:
        pair.hear("a"), pair.hear("b")
        again = copies(pair.tick(3.0))
    pair.tell(m.Replicated("j", 1, "b", error="no space"))
    assert pair.control.uncopied["j"].record.unreplicated == "step 1 could not be copied to b: no space"
    told, commands = pair.tick(3700.0)
    assert ("j", "unreplicated", 1) in told and not copies((told, commands))
    assert (pair.control.uncopied, pair.control.copies) == ({}, {})


def test_a_job_that_asks_for_no_copies_gets_none(c, w, t):
    for name in "ab":
        c.node(name)
        c.hear(name, facts=node(t, name, "cpu").facts)
    c.run(w.job("j", w.want("cpu", node="a")))
    saved(c, t, 1)
    assert copies(c.tick(5.0)) == []
