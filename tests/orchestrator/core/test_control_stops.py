"""A job has not finished if its attempt was stopped, for each cause, even if all its commands ended with 0."""

from dataclasses import replace

import pytest

from cluster.types import Notice
from orchestrator.core.controller import messages as m
from orchestrator.core.controller.commands import Stop
from workers.attempt.supervision import outcome


def move(c, w, t):
    return c.tell(m.MigrateRequested("j", ("tpu:v5e",)))


def drain(c, w, t):
    return c.tell(m.DrainRequested("a", now=True))


def notice(c, w, t):
    return c.hear("a", facts=replace(t.facts("a"), notice=Notice("its machine is shut down", 25.0)))


def preempt(c, w, t):
    c.submit(w.job("urgent", w.want("cpu"), priority=9))
    return c.tick()


def cancel(c, w, t):
    return c.tell(m.CancelRequested("j"))


def outcome_of(how, codes, stopped_ranks):
    """The outcome that the supervisor of a command reports after such a stop, which reached these ranks."""
    return outcome.state(how, codes, len(codes), outcome.Preemption(frozenset(stopped_ranks), is_command=True))


@pytest.fixture
def running(c, w):
    """Job j runs on node a."""
    c.node("a")
    c.node("v", kind="tpu:v5e")
    c.run(w.job("j", w.want("cpu")))
    return c


@pytest.mark.parametrize("cause", [move, drain, notice, preempt])
def test_a_job_that_was_stopped_continues_later_though_its_command_ended_with_zero(running, w, t, cause):
    events, commands = cause(running, w, t)
    assert ("j", "preempted", 1) in events and running.state("j") == "SAVING"
    [stop] = [command for command in commands if isinstance(command, Stop)]
    ended = outcome_of(stop.how, {0: 0}, {0})
    assert (stop, ended) == (Stop("a", "j", 1, "preempt"), "preempted")
    running.tell(m.StopAnswered("a", "j", 1, stop.how))
    assert running.hear("a", t.ended("j", 1, 0, ended, codes={0: 0}))[0] == [("j", "interrupted", 1)]
    assert running.state("j") == "RECOVERING"
    record = running.control.records["j"]
    assert (record.attempts[-1].outcome, record.job.interruptions, record.job.restarts) == ("preempted", 1, 0)


@pytest.mark.parametrize("cause", [move, drain, notice, preempt])
def test_a_job_that_had_ended_by_itself_before_it_was_stopped_has_finished(running, w, t, cause):
    """Its node reports after the request that the job had ended before it."""
    [stop] = [command for command in cause(running, w, t)[1] if isinstance(command, Stop)]
    ended = outcome_of(stop.how, {0: 0}, ())
    assert (ended, running.hear("a", t.ended("j", 1, 0, ended, codes={0: 0}))[0]) == (
        "succeeded",
        [("j", "finished", 1)],
    )


@pytest.mark.parametrize("stopped_ranks", [{0}, ()])
def test_a_cancelled_job_stays_cancelled_though_its_command_ended_with_zero(running, w, t, stopped_ranks):
    events, [stop] = cancel(running, w, t)
    assert (events, stop) == ([("j", "cancelled", 1)], Stop("a", "j", 1, "cancel"))
    ended = outcome_of(stop.how, {0: 0}, stopped_ranks)
    assert ended == "cancelled"
    assert running.hear("a", t.ended("j", 1, 0, ended, codes={0: 0}))[0] == [("j", "released", 1)]
