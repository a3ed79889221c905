"""What followed for a job from each message, in order and in words."""

import re
from typing import get_args, get_type_hints

import pytest

from orchestrator.core.attempt import story
from orchestrator.core.controller import messages as m
from orchestrator.core.controller.commands import Command, LogWarning


def texts(c, job="g"):
    return [
        story.step_text(0, 0.0, step.message, step.changes)[len("00:00:00.0 ") :] for step in story.story(c.lines, job)
    ]


@pytest.fixture
def two(gang, w):
    """Job g runs on nodes a and b, job other on node o."""
    gang.node("o")
    gang.run(w.job("other", w.want("cpu")))
    return gang


def test_a_story_names_the_message_and_what_followed_from_it_for_the_job(two, t):
    del two.lines[:]
    two.hear("b", t.ended("g", 1, 1, "failed", codes={1: 1}, kind="user"))
    number = two.control.messages
    (step,) = story.story(two.lines, "g")
    assert (step.number, step.message) == (number, "reply of b")
    assert step.changes[0] == "part b RUNNING → ENDED (reported_ended: failed, user)"
    assert step.changes[1] == "stop request of a NONE → REQUESTED (wanted: cancel)"
    assert re.fullmatch(r"stop g\.1 on a \(command \d+\): cancel", step.changes[2])


def test_a_reply_that_changes_nothing_and_what_other_jobs_do_is_not_in_it(two):
    del two.lines[:]
    two.hear("a")
    two.tell(m.CancelRequested("other"))
    assert texts(two) == []
    assert len(texts(two, "other")) == 1


def test_an_answer_names_the_number_of_its_command(two):
    done = two.tell(m.CancelRequested("g"))[1]
    stop = next(command for command in done if getattr(command, "node", "") == "a")
    two.tell(m.StopAnswered("a", "g", 1, "cancel", replies_to=stop.number))
    assert texts(two)[-2].split(" · ")[-2].endswith(f"stop g.1 on a (command {stop.number}): cancel")
    reply = f"stop answered g.1 on a (reply to command {stop.number}): cancel"
    assert texts(two)[-1].startswith(f"{reply} · stop request of a REQUESTED → ACK")


def test_commands_are_numbered_in_their_order_and_have_the_number_of_their_message(two):
    before = two.control
    commands = two.tell(m.CancelRequested("g"))[1]
    assert [command.number for command in commands] == [before.commands + 1 + i for i in range(len(commands))]
    assert {command.cause for command in commands} == {before.messages + 1}
    assert two.control.commands == before.commands + len(commands)


def test_changes_whose_message_is_no_longer_in_memory_are_in_the_story(two):
    two.tell(m.CancelRequested("g"))
    first = next(i for i, line in enumerate(two.lines) if line.text.startswith("cancel requested")) + 1
    del two.lines[:first]
    assert texts(two)[0].startswith(f"{story.MISSING_MESSAGE} · stop request of a")


def test_notes_are_in_the_story_of_every_job_and_warnings_in_that_of_the_job_that_they_name():
    lines = [story.note("the server started", 5.0)]
    lines += story.lines_of([m.Tick()], 1, [], [LogWarning("attempt j.1.0: node a is odd", cause=1)], 3_725.25)
    steps = story.story(lines, "j")
    assert [story.step_text(s.number, s.wall_s, s.message, s.changes) for s in steps] == [
        "00:00:05.0 the server started",
        "#1 01:02:05.2 tick · log warning: attempt j.1.0: node a is odd",
    ]
    assert [step.message for step in story.story(lines, "1")] == ["the server started"]


def test_a_long_text_is_cut_and_has_one_line():
    lines = story.lines_of([m.Tick()], 1, [], [LogWarning("j\n" * 1000, cause=1)], 0.0)
    assert len(lines[1].text) == story.MAX_TEXT + 1
    assert "\n" not in lines[1].text


@pytest.mark.parametrize("kind", [*get_args(m.Message), *get_args(Command)], ids=lambda kind: kind.__name__)
def test_the_reason_in_a_message_or_command_is_text(kind):
    """A line that could not be written would stop the controller's thread."""
    hints = get_type_hints(kind)
    assert {hints[name] for name in story.REASONS if name in hints} <= {str}
