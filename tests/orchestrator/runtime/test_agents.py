"""Which agents are watched. Ray, which makes them, is recorded: an actor here is an object that nobody calls."""

import threading
from concurrent.futures import Future

import pytest
from patience import LIMIT_S, wait_for

from cluster.errors import FleetError
from orchestrator.core.controller.messages import AgentDied, AgentStarted
from orchestrator.runtime.agents import actors, agents
from orchestrator.runtime.agents.agents import Agents


class RecordedRay:
    """Makes an agent for a Ray node once `answers` says so."""

    def __init__(self):
        self.answers = threading.Event()
        self.made = []

    def make(self, ray_id, cpus, deliver):
        assert self.answers.wait(LIMIT_S)
        self.made.append(ray_id)
        return object()


@pytest.fixture
def ray(monkeypatch):
    recorded = RecordedRay()
    monkeypatch.setattr(actors, "start_agent", recorded.make)
    yield recorded
    recorded.answers.set()


def test_an_agent_that_was_made_is_told_and_watched(ray):
    told = []
    agents = Agents(told.append)
    agents.start("a", "ray-1")
    ray.answers.set()
    wait_for(lambda: told == [AgentStarted("a", "ray-1")])
    assert agents.idle_agents() == ["a"]


def test_an_agent_that_takes_long_to_make_is_made_once_however_often_it_is_asked_for(ray):
    told = []
    agents = Agents(told.append)
    for _ in range(5):
        agents.start("a", "ray-1")
    ray.answers.set()
    wait_for(lambda: told == [AgentStarted("a", "ray-1")])
    agents.start("a", "ray-1")
    wait_for(lambda: len(told) == 2)
    assert ray.made == ["ray-1", "ray-1"]


def test_an_agent_that_is_not_made_within_its_limit_is_tried_again_beside(ray, monkeypatch):
    monkeypatch.setattr(agents, "LIMIT_S", 0.0)
    told = []
    watched = Agents(told.append)
    for _ in range(2):
        watched.start("a", "ray-1")
    ray.answers.set()
    wait_for(lambda: len(told) == 2)


def test_an_agent_whose_node_got_another_name_while_it_was_made_is_watched_by_that_name_only(ray):
    """Two watches of one agent end each other: it would be taken for hung, again and again."""
    told = []
    agents = Agents(told.append)
    agents.start("a-ray-1", "ray-1")
    agents.unwatch("a-ray-1", "ray-1")
    agents.start("a", "ray-1")
    ray.answers.set()
    wait_for(lambda: len(ray.made) == 2 and told)
    assert told == [AgentStarted("a", "ray-1")]
    assert agents.idle_agents() == ["a"]


def test_a_late_agent_of_the_node_before_does_not_replace_that_of_the_node_that_took_its_name(ray):
    told = []
    agents = Agents(told.append)
    agents.start("a", "ray-1")
    agents.unwatch("a", "ray-1")
    agents.start("a", "ray-2")
    ray.answers.set()
    wait_for(lambda: len(ray.made) == 2 and told)
    agents.unwatch("a", "ray-1")
    assert told == [AgentStarted("a", "ray-2")] and agents.idle_agents() == ["a"]


class Failing:
    """An actor that restarts: all of its methods fail at once. `asked` counts them."""

    def __init__(self, error):
        self.asked, self.error = 0, error

    def __getattr__(self, name):
        return self

    def remote(self, *_):
        self.asked += 1
        return self

    def future(self):
        failed = Future()
        failed.set_exception(self.error)
        return failed


@pytest.mark.parametrize(("rest_s", "soon"), [(LIMIT_S, False), (0.05, True)])
def test_a_watch_that_fails_at_once_rests_before_the_next(monkeypatch, rest_s, soon):
    actor, told = Failing(FleetError("the actor restarts")), []
    monkeypatch.setattr(actors, "start_agent", lambda ray_id, cpus, deliver: actor)
    monkeypatch.setattr(agents, "PAUSE_AFTER_FAILURE_S", rest_s)
    watched = Agents(told.append)
    watched.start("a", "ray-1")
    wait_for(lambda: told)
    watched.poll("a", {}, {}, 2.0)
    assert actor.asked == 1
    if soon:
        wait_for(lambda: watched.idle_agents() == ["a"])
    else:
        assert watched.idle_agents() == []


def test_an_agent_that_hung_is_told_once_although_its_end_is_seen_later(monkeypatch):
    from ray.exceptions import ActorUnavailableError

    told, repaired = [], []
    actor = Failing(ActorUnavailableError("it restarts", None))
    monkeypatch.setattr(actors, "start_agent", lambda ray_id, cpus, deliver: actor)
    monkeypatch.setattr(actors, "restart_hung_actor", lambda actor, facts: None)
    monkeypatch.setattr(agents, "PAUSE_AFTER_FAILURE_S", 0.0)
    watched = Agents(told.append, lambda node, said: repaired.append(said))
    watched.start("a", "ray-1")
    wait_for(lambda: told)
    watched.restart("a", "ray-1", "it did not answer")
    watched.poll("a", {}, {}, 2.0)
    assert repaired == ["it did not answer"] and AgentDied("a", "ray-1") in told
