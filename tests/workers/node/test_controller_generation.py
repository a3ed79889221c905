"""Which controller an agent obeys, what it tells a new one, and whose folder it keeps."""

import pickle
from contextlib import nullcontext

import pytest

from cluster.errors import Conflict, UserError
from workers.errors import ControllerSuperseded
from workers.node.agent import Agent
from workers.node.controller_generation import ControllerGeneration
from workers.node.node_facts import node_identity
from workers.protocol.messages import Order


@pytest.fixture
def make(tmp_path):
    return lambda: Agent(tmp_path / "node", tmp_path / "storage", "n0", "cpu", "cpu")


@pytest.mark.parametrize(
    "call",
    [
        lambda agent, by: agent.poll(by, {}, {}, 0.0),
        lambda agent, by: agent.start(by, {}, {}),
        lambda agent, by: agent.stop(by, "j", 1, "cancel"),
        lambda agent, by: agent.remove_shared_files(by, "j", 1),
    ],
)
def test_an_older_controller_is_refused_also_by_the_next_agent(make, call):
    make().register(7)
    agent = make()
    with pytest.raises(Conflict, match=r"a newer controller \(generation 7\) has taken over"):
        call(agent, 6)
    assert agent.poll(7, {}, {}, 0.0)["reports"] == []


def test_an_older_controller_is_told_how_high_it_has_to_count(make):
    make().register(7)
    told = make().register(3)
    assert (told["generation"], told["facts"]["node"]) == (7, "n0")
    assert make().register(8)["generation"] == 8


def test_a_new_controller_hears_of_every_epoch_that_ran_or_was_stopped_here(make, tmp_path):
    make()
    for name in ("a.1.0", "a.3.0", "a.2.1", "b.5.0", "not-an-attempt"):
        (tmp_path / "node/attempts" / name).mkdir()
    agent = make()
    agent.stop(1, "c", 4, "cancel")
    assert agent.register(1)["epochs"] == {"a": 3, "b": 5, "c": 4}
    assert make().register(1)["epochs"] == {"a": 3, "b": 5, "c": 4}


@pytest.mark.parametrize("generation", [None, "7", -1, True, 1.5])
def test_a_generation_is_a_whole_number(tmp_path, generation):
    with pytest.raises(UserError, match="is not a controller's generation"):
        ControllerGeneration(tmp_path / "generation").check_and_record(generation)


def test_a_record_that_is_none_counts_as_no_controller(tmp_path):
    (tmp_path / "generation").write_text("seven")
    it = ControllerGeneration(tmp_path / "generation")
    it.check_and_record(2)
    assert ControllerGeneration(tmp_path / "generation").newest == 2


def test_the_refusal_crosses_ray(tmp_path):
    it = pickle.loads(pickle.dumps(ControllerSuperseded(3, 7)))
    assert (it.generation, it.newest, str(it)) == (3, 7, str(ControllerSuperseded(3, 7)))


def test_agents_of_two_fleets_on_one_node_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYFLEET_NODE_DIR", str(tmp_path / "n"))
    monkeypatch.setenv("POLYFLEET_FLEET", "f1")
    own, same, other = (node_identity("n", "cpu", "cpu", None, None, fleet) for fleet in (None, "f1", "f2"))
    assert (own.fleet, own.node_dir) == ("f1", tmp_path / "n")
    assert same == own
    assert (other.fleet, other.node_dir) == ("f2", tmp_path / "n/fleets/f2")


@pytest.mark.parametrize(("fleet", "refused"), [("f1", True), ("f2", False)])
def test_the_fences_in_a_nodes_folder_are_those_of_its_own_fleet(tmp_path, monkeypatch, fleet, refused):
    (tmp_path / "fences").mkdir()
    (tmp_path / "fences/j").write_text("3\n")
    monkeypatch.setenv("POLYFLEET_FLEET", "f1")
    monkeypatch.setenv("POLYFLEET_FENCE_DIR", str(tmp_path / "fences"))
    agent = Agent(tmp_path / "node", tmp_path / "storage", "n0", "cpu", "cpu", fleet)
    order = Order("j", 2, "run", "cpu", "cpu", False, (0,), 0, 1, 0, 1, 1, "127.0.0.1", 1, command=("true",),
                  lease_s=600.0)  # fmt: skip
    with pytest.raises(Conflict, match="superseded by attempt 3") if refused else nullcontext():
        agent.start(1, order.to_plain(), {})
    known = {}
    while not refused and known.get("j.2.0") != "ended":
        for report in agent.poll(1, {}, known, 5.0)["reports"]:
            known["j.2.0"] = report["phase"]
