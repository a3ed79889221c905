"""Which agents are watched. Ray, which makes them, is recorded: an actor here is an object that nobody calls."""

import threading
import time

import pytest

from orchestrator.core.messages import AgentMade
from orchestrator.runtime import actors
from orchestrator.runtime.agents import Agents

PATIENCE_S = 20.0


class RecordedRay:
    """Makes an agent for a Ray node once `answers` says so."""

    def __init__(self):
        self.answers = threading.Event()
        self.made = []

    def make(self, ray_id):
        assert self.answers.wait(PATIENCE_S)
        self.made.append(ray_id)
        return object()


@pytest.fixture
def ray(monkeypatch):
    recorded = RecordedRay()
    monkeypatch.setattr(actors, "make", recorded.make)
    yield recorded
    recorded.answers.set()


def until(truth):
    deadline = time.monotonic() + PATIENCE_S
    while not truth():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_an_agent_that_was_made_is_told_and_watched(ray):
    told = []
    agents = Agents(told.append)
    agents.make("a", "ray-1")
    ray.answers.set()
    until(lambda: told == [AgentMade("a", "ray-1")])
    assert agents.unwatched() == ["a"]


def test_an_agent_whose_node_got_another_name_while_it_was_made_is_watched_by_that_name_only(ray):
    """Two watches of one agent end each other: it would be taken for hung, again and again."""
    told = []
    agents = Agents(told.append)
    agents.make("a-ray-1", "ray-1")
    agents.drop("a-ray-1", "ray-1")
    agents.make("a", "ray-1")
    ray.answers.set()
    until(lambda: len(ray.made) == 2 and told)
    assert told == [AgentMade("a", "ray-1")]
    assert agents.unwatched() == ["a"]


def test_a_late_agent_of_the_node_before_does_not_replace_that_of_the_node_that_took_its_name(ray):
    told = []
    agents = Agents(told.append)
    agents.make("a", "ray-1")
    agents.drop("a", "ray-1")
    agents.make("a", "ray-2")
    ray.answers.set()
    until(lambda: len(ray.made) == 2 and told)
    agents.drop("a", "ray-1")
    assert told == [AgentMade("a", "ray-2")] and agents.unwatched() == ["a"]
