"""Jobs are one class on the board only where all that decides on their places is the same."""

from orchestrator.core.jobs.expected_duration import expectation
from orchestrator.core.model import Candidate, Devices, Job, Snapshot
from orchestrator.core.plan.assignment.board import board
from orchestrator.core.plan.options.capacity import FreeCapacity


def test_jobs_that_divide_different_batches_get_different_numbers_of_devices() -> None:
    node = Devices("n/k", "n", "p", "env", "nvidia", "nvidia:K", (0, 1, 2, 3), 4)
    jobs = tuple(_job(size) for size in (6, 8))
    seen = Snapshot(0.0, (node,), jobs)
    found = board(seen, jobs, (), FreeCapacity(seen), 0, expectation(seen))
    assert [[way.place.count for way in ways] for ways in found.choices] == [[1, 2, 3], [1, 2, 4]]


def _job(batch_size: int) -> Job:
    want = Candidate(("nvidia:K",), 4, 1, whole_batch=True, batch_size=batch_size)
    return Job(f"j{batch_size}", "j", "train", (want,), number=batch_size)
