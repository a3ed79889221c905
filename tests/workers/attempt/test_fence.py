import os
import signal
import subprocess
import sys

import pytest
from patience import LIMIT_S

from cluster.errors import Conflict, FleetError
from workers.attempt.attempt_table import FALLBACK_LEASE_S
from workers.protocol import fence, lease
from workers.protocol.fence import FenceReader, FenceUnreadable

FOREVER = ("sh", "-c", "echo ready; exec sleep 600")


class Store:
    """Ray's key-value store at the edge, as its client answers: bytes, None, or an error in time."""

    def __init__(self, **jobs):
        self.jobs, self.away, self.asked, self.limits_s = jobs, False, [], []

    def __call__(self, key, limit_s):
        self.asked.append(key)
        self.limits_s.append(limit_s)
        if self.away:
            raise FenceUnreadable("no answer within 3 s")
        return self.jobs.get(key.rpartition("/")[2])


@pytest.fixture
def running(node):
    """A running attempt of epoch 3, half of whose lease is over."""
    node.start(command=FOREVER, epoch=3)
    node.until(lambda: node.folder(epoch=3).started.exists(), "it runs")
    (attempt,) = node.attempts.live_attempts()
    lease.write(attempt.folder.lease, 300.0)
    return attempt


@pytest.mark.parametrize("newest", [None, b"2", b"3"])
def test_while_nobody_took_over_the_lease_is_renewed(running, newest):
    before = lease.deadline_s(running.folder.lease)
    fence.renew_or_stop([running], FenceReader(stored=Store(j=newest)))
    assert lease.deadline_s(running.folder.lease) > before + 20


def test_an_attempt_that_is_fenced_off_ends(node, running):
    fence.renew_or_stop([running], FenceReader(stored=Store(j=b"4")))
    assert node.outcome(epoch=3)["state"] == "fenced"


def test_an_attempt_that_is_stopped_because_its_files_are_unreadable_is_not_renewed(running):
    before = lease.deadline_s(running.folder.lease)
    running.mark_unreadable("order.json cannot be read")
    fence.renew_or_stop([running], FenceReader(stored=Store(j=b"3")))
    assert lease.deadline_s(running.folder.lease) == before


def test_nothing_is_renewed_where_no_place_answers(running, tmp_path):
    store = Store(j=b"3")
    store.away = True
    before = lease.deadline_s(running.folder.lease)
    fence.renew_or_stop([running], FenceReader(stored=store))
    fence.renew_or_stop([running], FenceReader(stored=store, folder=tmp_path / "absent"))
    assert lease.deadline_s(running.folder.lease) == before


def test_while_rays_head_is_away_the_servers_folder_renews_and_ends(node, running, tmp_path):
    store, folder = Store(j=b"3"), tmp_path / "fences"
    store.away = True
    folder.mkdir()
    (folder / "j").write_text("3\n")
    fences, before = FenceReader("f1", folder, store), lease.deadline_s(running.folder.lease)
    fence.renew_or_stop([running], fences)
    assert lease.deadline_s(running.folder.lease) > before + 20
    (folder / "j").write_text("4\n")
    fence.renew_or_stop([running], fences)
    assert node.outcome(epoch=3)["state"] == "fenced"
    assert store.asked == ["polyfleet/f1/fence/j"], "a store that does not answer is not asked for every attempt"


@pytest.mark.parametrize("lease_s", [FALLBACK_LEASE_S, 9.0, 600.0])
def test_a_head_that_takes_connections_and_does_not_answer_lets_no_lease_pass_that_the_folder_renews(tmp_path, lease_s):
    """As while it is being started. The server has been silent for a third of the lease, and a second more."""
    store = Store()
    store.away = True
    assert FenceReader("f1", tmp_path, store).read("j", lease_s).epoch == 0
    assert max(store.limits_s) < lease_s - lease_s / 3 - 1.0


def test_the_higher_fence_counts(tmp_path):
    (tmp_path / "j").write_text("7\n")
    assert FenceReader(folder=tmp_path, stored=Store(j=b"5")).epoch("j") == 7
    assert FenceReader(folder=tmp_path, stored=Store(j=b"9")).epoch("j") == 9
    assert FenceReader(folder=tmp_path, stored=Store()).epoch("other") == 0


@pytest.mark.parametrize("text", ["", "-1", "seven", "9" * 99])
def test_a_fence_that_is_no_epoch_is_not_read_as_one(tmp_path, text):
    (tmp_path / "j").write_text(text)
    with pytest.raises(FenceUnreadable):
        FenceReader(folder=tmp_path).epoch("j")


def test_an_epoch_below_the_fence_is_not_started(node, tmp_path):
    (tmp_path / "j").write_text("3\n")
    node.fences = FenceReader(folder=tmp_path)
    node.reopen()
    with pytest.raises(Conflict, match="attempt 2 of j was superseded by attempt 3"):
        node.start(epoch=2)
    assert not node.folder(epoch=2).path.exists()
    node.start(epoch=3)
    assert node.outcome(epoch=3)["state"] == "succeeded"


def test_nothing_is_started_while_its_fence_cannot_be_read(node, tmp_path):
    node.fences = FenceReader(folder=tmp_path / "absent")
    node.reopen()
    with pytest.raises(FleetError, match="node n0 cannot check whether attempt 1 of j is current"):
        node.start()
    assert not node.folder().path.exists()
    (tmp_path / "absent").mkdir()
    node.start()
    assert node.outcome()["state"] == "succeeded"


FROZEN = """
import os, signal, sys
from pathlib import Path
from workers.attempt.attempts import AttemptManager
from workers.protocol.messages import Order
from workers.storage.code_archives import NodeCodeArchives

def threads(order):  # asked for once the fence was read, before the lease is written
    print("frozen", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    return 1

root = Path(sys.argv[1])
attempts = AttemptManager(root / "attempts", root / "storage", "n0", NodeCodeArchives(root / "packages"), threads)
attempts.start(
    Order("j", 1, "run", "cpu", "cpu", False, (0,), 0, 1, 0, 1, 1, "127.0.0.1", 1, command=("touch", str(root / "ran")),
          lease_s=1.0), {})
"""


def test_an_agent_that_is_frozen_amid_a_start_starts_nothing_afterwards(node, tmp_path):
    """The lease begins when the fence is read, not when the ranks are started."""
    command = [sys.executable, "-c", FROZEN, str(node.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout.readline() == "frozen\n"
        began_s = lease.now_s()
        node.until(lambda: lease.now_s() > began_s + 1.5, "a lease has passed")
        os.kill(agent.pid, signal.SIGCONT)
        assert agent.wait(LIMIT_S) == 0
    node.reopen()
    assert node.outcome()["state"] == "lost"
    assert not (tmp_path / "ran").exists()
