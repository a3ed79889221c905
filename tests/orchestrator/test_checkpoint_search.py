"""Which of the storages of a pool has the checkpoint that is meant, by what a node of each answered."""

import pytest

from cluster.errors import FleetError
from cluster.input.checkpoint_location import CheckpointLocation
from orchestrator.runtime.checkpoints.checkpoint_search import CheckpointMatch, choose_newest
from workers.checkpoint.format.manifest import DamagedCheckpoint

NOTHING = {"path": "", "passed_over": []}


def step(number, *damaged):
    passed_over = [{"path": f"j/step-{one:012}-x", "reason": "rotted"} for one in damaged]
    return {"path": f"j/step-{number:012}-x" if number else "", "passed_over": passed_over}


def found(node, number, *damaged):
    return CheckpointMatch(
        node, CheckpointLocation("cpu", f"j/step-{number:012}-x"), tuple(step(number, *damaged)["passed_over"])
    )


def test_the_storage_that_has_the_newest_is_chosen_and_of_equal_ones_the_first():
    assert choose_newest("cpu", {"a": step(8), "b": step(12), "c": NOTHING, "d": step(12)}) == found("b", 12)


def test_nothing_anywhere_is_no_error():
    assert choose_newest("cpu", {"a": NOTHING, "b": NOTHING}) is None


def test_what_one_storage_passes_over_as_damaged_another_may_have_sound():
    assert choose_newest("cpu", {"a": step(8, 12), "b": step(12)}) == found("b", 12)
    assert choose_newest("cpu", {"a": step(8, 12), "b": step(9)}) == found("b", 9, 12)


def test_what_a_node_raised_counts_only_where_no_other_has_one():
    damaged, silent = DamagedCheckpoint("none of them is sound"), FleetError("node b gave no answer")
    assert choose_newest("cpu", {"a": damaged, "b": silent, "c": step(3)}) == found("c", 3)
    with pytest.raises(DamagedCheckpoint):
        choose_newest("cpu", {"a": damaged, "b": NOTHING})
    with pytest.raises(FleetError, match="node b gave no answer"):
        choose_newest("cpu", {"a": NOTHING, "b": silent})
