"""A training goes on with another number of ranks, and its batch as a whole stays what it was."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.full

EXAMPLE = Path(__file__).parents[3] / "examples" / "elastic"


def losses(part):
    return {event["step"]: event["loss"] for event in part.events("report")}


def test_a_run_that_grows_to_two_ranks_and_shrinks_again_has_the_losses_of_the_uninterrupted_one(attempt):
    shared = {"entry": "train.py", "checkpoint_root": "../checkpoints", "seed": 7}
    path, changing = "", {}
    for name, ranks, steps in (("one", 1, 10), ("two", 2, 20), ("one-again", 1, 30)):
        part = attempt(name, arguments={"steps": steps}, resume_from=path, batch_size=32 // ranks, **shared)
        results = part.run_in(EXAMPLE, world_size=ranks)
        assert [one["returned"] for one in results] == [{"first": steps - 9, "last": steps, "ranks": ranks}] * ranks
        changing |= losses(part)
        path = str(part.code / part.events("checkpoint")[-1]["path"])
    straight = attempt("straight", arguments={"steps": 30}, batch_size=32, **shared)
    straight.run_in(EXAMPLE)
    expected = losses(straight)
    assert list(expected) == list(range(1, 31))
    assert expected[30] < expected[1]
    assert changing == pytest.approx(expected, abs=1e-5)
