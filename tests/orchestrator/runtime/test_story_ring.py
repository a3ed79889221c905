"""The server has the newest lines of the story in memory, only of messages whose events are stored."""

import pytest

from orchestrator.core.attempt.story import note, story
from orchestrator.core.controller import messages as m
from orchestrator.core.jobs.fold import submitted
from orchestrator.core.model import Candidate, Job
from orchestrator.core.step import control
from orchestrator.runtime.clock import now
from orchestrator.runtime.controller.step_batch import StepBatch, StoryRing
from orchestrator.runtime.jobs.jobs import Jobs, StoreUnavailable
from orchestrator.store.events.event_store import EventStore


def test_only_the_newest_lines_are_kept_in_order():
    ring = StoryRing(3)
    for number in range(5):
        ring.add([note(str(number), 0.0)])
    assert [line.text for line in ring.lines()] == ["2", "3", "4"]


@pytest.fixture
def batch(tmp_path):
    """A batch of the controller with the job j, and its jobs."""
    store = EventStore(f"sqlite:///{tmp_path / 'jobs.db'}")
    jobs = Jobs(store)
    batch = StepBatch(jobs, control.control_from_log([], {}, {}, now()), lambda state: None)
    jobs.commit([submitted(Job("j", "j", "run", (Candidate(("cpu",)),)), {}, 1.0)])
    batch.apply([m.Submitted((jobs["j"],)), m.ClusterJoined()])
    yield batch, jobs
    store.close()


LISTED = m.NodesListed((m.ListedNode("ray-a", "a"),))


def test_messages_from_which_something_followed_have_a_line_and_others_have_none(batch):
    steps, _ = batch
    steps.apply([LISTED, LISTED])
    assert [line.text for line in steps.story.lines()] == [
        "the server started",
        "nodes listed",
        f"start agent on a (command {steps.control.commands})",
    ]


def test_what_cannot_be_stored_is_not_in_the_story(batch, monkeypatch):
    steps, jobs = batch

    def refuse(*_):
        raise StoreUnavailable("the disk is full", "")

    monkeypatch.setattr(jobs, "commit", refuse)
    before = steps.story.lines(), steps.control.messages
    with pytest.raises(StoreUnavailable):
        steps.apply([LISTED, m.CancelRequested("j")])
    assert (steps.story.lines(), steps.control.messages) == before


def test_each_server_begins_its_story_with_its_start(batch):
    assert [step.message for step in story(batch[0].story.lines(), "j")] == ["the server started"]
