"""Answers of many agents that are taken together change what they change one by one."""

from orchestrator.core.controller import messages as m
from orchestrator.core.controller.commands import RemoveFiles, StoreReport
from orchestrator.core.controller.messages import Now
from orchestrator.core.step import control as core
from workers.protocol.messages import AttemptStatus, RankEvent


def test_answers_taken_together_are_as_one_after_the_other(c, w):
    c.node("a")
    c.node("b")
    for name in ("one", "two"):
        c.run(w.job(name, w.want("cpu")))
    told = tuple(RankEvent("report", 0, 1.0, at, {"step": at}) for at in (1, 2))
    beats = [
        m.Heartbeat(
            part.node,
            f"ray-{part.node}",
            c.s,
            None,
            (
                AttemptStatus(live.job, 1, 0, "running", told, 2),
                AttemptStatus(live.job, 0, 0, "ended", (), 0),  # files of an older attempt, which are removed
            ),
        )
        for live in c.control.attempts.values()
        for part in live.parts
    ]
    at, state, events, commands, transitions = Now(c.s, c.wall_s), c.control, (), (), ()
    for beat in beats:
        done = core.step(state, beat, at)
        state, events, commands = done.control, events + done.events, commands + done.commands
        transitions += done.transitions
    assert [type(command) for command in commands] == [StoreReport, StoreReport, RemoveFiles] * 2
    together = core.step_replies(c.control, beats, at)
    assert together == (state, events, commands, transitions)
    removals = [command for command in commands if isinstance(command, RemoveFiles)]
    assert [command.cause for command in removals] == [c.control.messages + 1, c.control.messages + 2]
    assert [command.number for command in removals] == [c.control.commands + 3, c.control.commands + 6]
    assert [(x.cause, x.number) for x in together.commands] == [(x.cause, x.number) for x in commands]
