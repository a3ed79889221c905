"""Of servers that start together, replies of nodes leave exactly one in control, whatever their order."""

from random import Random

import pytest

from orchestrator.runtime.agents.server_generation import ServerGeneration
from workers.errors import ControllerSuperseded
from workers.node.controller_generation import ControllerGeneration


@pytest.fixture
def ours():
    """The generation 5, which node a obeys; node b has just joined."""
    made = ServerGeneration()
    made.number = 5
    made.handle_obeyed("a")
    return made


def test_a_generation_that_a_joining_node_reports_is_exceeded_once(ours):
    floors = []
    ours.handle_newest("b", 9)
    for _ in range(2):
        ours.rise(lambda floor: floors.append(floor) or 20)
    assert floors == [9] and ours.number == 20
    ours.handle_newest("a", 9)
    assert not ours.superseded_by, "our new number is above it"


def test_a_server_that_was_taken_over_raises_its_number_no_more(ours):
    ours.handle_newest("b", 9)
    ours.handle_newest("a", 9)
    ours.rise(lambda floor: pytest.fail("none is stored"))
    assert "has taken over the fleet (node a obeys it)" in ours.superseded_by and ours.number == 5


def test_a_server_that_is_taken_over_while_its_new_number_is_stored_keeps_the_old(ours):
    ours.handle_newest("b", 9)
    ours.rise(lambda floor: ours.handle_newest("a", 9) or 20)
    assert ours.superseded_by and ours.number == 5


class Server:
    """Calls nodes as `Agents` does: `register` until a node accepts that, then `poll` until it refuses one."""

    def __init__(self, number, chance):
        self.own, self.registered, self.chance = ServerGeneration(), set(), chance
        self.own.number = number

    def call(self, name, node):
        self.own.rise(lambda floor: floor + self.chance.randint(1, 1000))
        try:
            node.check_and_record(self.own.number)
        except ControllerSuperseded as refused:
            self.registered.discard(name)
            self.own.handle_newest(name, refused.newest)
        else:
            if name in self.registered:
                self.own.handle_obeyed(name)
            self.registered.add(name)


@pytest.mark.parametrize("seed", range(100))
def test_of_two_servers_that_start_together_one_is_left(seed, tmp_path):
    chance = Random(seed)
    nodes = {name: ControllerGeneration(tmp_path / name) for name in ("a", "b")}
    servers = [Server(number, chance) for number in (1, 2)]
    calls = 0
    while calls < 20:  # after one was superseded
        server, name = chance.choice(servers), chance.choice(["a", "b"])
        calls += any(one.own.superseded_by for one in servers)
        if not server.own.superseded_by or chance.random() < 0.5:  # a call that had begun before
            server.call(name, nodes[name])
    [left] = [one for one in servers if not one.own.superseded_by]
    assert {node.newest for node in nodes.values()} == {left.own.number}
