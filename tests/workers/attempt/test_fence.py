import pytest

from workers.attempt import fence, lease

FOREVER = ("sh", "-c", "echo ready; exec sleep 600")


@pytest.fixture
def running(node):
    """A running attempt of epoch 3 whose lease ends soon."""
    node.start(command=FOREVER, epoch=3)
    node.until(lambda: node.folder(epoch=3).started.exists(), "it runs")
    (attempt,) = node.attempts.live()
    lease.write(attempt.folder.lease, 30.0)
    return attempt


@pytest.mark.parametrize("newest", [None, 2, 3])
def test_while_nobody_took_over_the_lease_is_renewed(running, newest):
    before = lease.deadline_s(running.folder.lease)
    fence.check([running], lambda job: newest)
    assert lease.deadline_s(running.folder.lease) > before + 20


def test_an_attempt_that_is_fenced_off_ends(node, running):
    fence.check([running], lambda job: 4)
    assert node.outcome(epoch=3)["state"] == "cancelled"


def test_nothing_is_renewed_on_no_answer(running):
    def silent(job):
        raise fence.Unreadable

    before = lease.deadline_s(running.folder.lease)
    fence.check([running], silent)
    assert lease.deadline_s(running.folder.lease) == before
