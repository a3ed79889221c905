import pickle

from orchestrator.runtime.agents.ray_capacity import (
    RayResources,
    explain_shortage,
    fits,
    is_stuck,
    reserved_by_node,
    shared,
)

FREE = {"a": {"CPU": 2.0, "GPU": 1.0}, "b": {"CPU": 0.5}}


def test_bundles_fit_where_every_node_has_room_for_their_sum():
    assert fits([{"CPU": 1.0}, {"GPU": 1.0}, {"CPU": 0.5}], ["a", "a", "b"], FREE)
    assert not fits([{"CPU": 1.5}, {"CPU": 1.0}], ["a", "a"], FREE)


def test_a_resource_or_a_node_that_is_not_there_has_no_room():
    assert not fits([{"TPU": 1.0}], ["a"], FREE)
    assert not fits([{"CPU": 0.1}], ["gone"], FREE)


def test_shares_that_ray_rounds_still_fit():
    assert fits([{"CPU": 2 / 3}], ["a"], {"a": {"CPU": 0.6667}})
    assert fits([{"CPU": 2 / 3}], ["a"], {"a": {"CPU": 0.6666}})


def ray(free, held=None, shared=()):
    return RayResources({"a": {"CPU": 2.0}, "b": {"CPU": 2.0}}, free, held or {}, frozenset(shared))


def explain(*told, **more):
    error = explain_shortage([{"CPU": 2.0}, {"CPU": 2.0}], ["a", "b"], ray(*told, **more))
    return error.lacking, error.stuck, str(error)


def test_a_node_of_which_a_group_holds_what_is_missing_is_short_of_it():
    short, unheld, said = explain({"a": {}, "b": {"CPU": 2.0}}, {"a": {"CPU": 1.0}})
    assert (short, unheld) == (("a",), ()) and said.startswith(
        "Ray does not report 2 CPU of node a as free: another program of this Ray cluster uses them, or Ray missed"
    )


def test_what_is_missing_and_nobody_holds_is_told():
    short, unheld, said = explain({"a": {}, "b": {"CPU": 0.5}})
    assert (short, unheld) == (("a", "b"), ("a", "b"))
    assert "2 CPU of node a, 2 CPU of node b as free: nothing that Ray lists uses them, so Ray missed that" in said


def test_where_others_run_something_or_ray_knows_no_node_nobody_knows_who_holds_it():
    assert explain({"a": {}, "b": {}}, shared=("b",))[:2] == (("a", "b"), ("a",))
    assert explain({"b": {"CPU": 2.0}})[:2] == (("a",), ())


def test_the_names_of_nodes_replace_their_ids():
    error = explain_shortage([{"CPU": 2.0}], ["a"], ray({"a": {}})).with_names({"a": "left-0"})
    assert (error.lacking, error.stuck) == (("left-0",), ("left-0",)) and "2 CPU of node left-0" in str(error)
    assert pickle.loads(pickle.dumps(error)).args == error.args


def test_groups_that_are_removed_or_lie_nowhere_hold_nothing():
    bundles = {0: {"CPU": 1.0}, 1: {"CPU": 0.5}}
    rows = [
        {"state": "CREATED", "bundles": bundles, "bundles_to_node_id": {0: "a", 1: "a"}},
        {"state": "CREATED", "bundles": bundles, "bundles_to_node_id": {0: "a", 1: "b"}},
        {"state": "REMOVED", "bundles": bundles, "bundles_to_node_id": {0: "a", 1: "b"}},
        {"state": "PENDING", "bundles": bundles, "bundles_to_node_id": {0: "", 1: ""}},
    ]
    assert {node: amounts for node, amounts in reserved_by_node(rows).items() if node} == {
        "a": {"CPU": 2.5},
        "b": {"CPU": 0.5},
    }


def test_what_is_withheld_is_neither_free_nor_held_where_nobody_else_may_run():
    assert is_stuck("a", ray({"a": {"CPU": 1.0}}))
    assert not is_stuck("a", ray({"a": {"CPU": 2.0}})), "all is free"
    assert not is_stuck("a", ray({"a": {}}, {"a": {"CPU": 1.0}})), "a group lies there"
    assert not is_stuck("a", ray({"a": {}}, shared=("a",)))
    assert not is_stuck("c", ray({"a": {}})) and not is_stuck("b", ray({"a": {}})), "Ray knows nothing of it"


def test_memory_of_objects_is_not_counted():
    told = RayResources(
        {"a": {"CPU": 2.0, "object_store_memory": 9.0}}, {"a": {"CPU": 2.0, "object_store_memory": 1.0}}, {}
    )
    assert not is_stuck("a", told)


def test_a_node_is_shared_where_an_actor_lives_that_is_not_our_agent_there():
    def actor(name, node="a"):
        return {"Name": name, "Address": {"NodeID": node}}

    assert shared([actor("agent-a"), actor("agent-b", "b")], ()) == frozenset()
    assert shared([actor("agent-a"), actor("")], ()) == {"a"}
    assert shared([actor("agent-0")], ()) == {"a"}
    assert shared([actor("agent-a")], {"agent-a"}) == {"a"}, "or that of another fleet"


def test_shares_of_all_devices_that_do_not_come_out_even_are_not_taken_for_lost():
    """Ray holds five times 0.6667 of four CPUs."""
    rows = [{"state": "CREATED", "bundles": {0: {"CPU": 4 / 6}}, "bundles_to_node_id": {0: "a"}}] * 5
    told = RayResources({"a": {"CPU": 4.0}}, {"a": {"CPU": 0.6665}}, reserved_by_node(rows))
    assert explain_shortage([{"CPU": 4 / 6}], ["a"], told).stuck == ()


def test_what_ray_reports_as_free_and_does_not_reserve_is_said_so():
    error = explain_shortage([{"CPU": 2.0}], ["a"], ray({"a": {"CPU": 2.0}}))
    assert error.lacking == () and "Ray reports 2 CPU of node a as free, but did not reserve them in time" in str(error)
