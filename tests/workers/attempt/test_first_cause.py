"""Which rank of a gang failed first: the one that is told, whatever its sisters say of a connection that broke."""

import os
import signal

import pytest

from workers.processes import process_tree

# A full mesh of sockets; a rank whose peer has gone ends with an error, as a collective would.
MESH = """
import os, select, socket, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
open(f"pid-{rank}", "w").write(str(os.getpid()))
os.chdir(os.environ["POLYFLEET_ATTEMPT_DIR"])
listening = socket.socket(socket.AF_UNIX)
listening.bind(f"mesh-{rank}")
listening.listen(size)
peers = []
for other in range(rank):
    peer = socket.socket(socket.AF_UNIX)
    while True:
        try:
            peer.connect(f"mesh-{other}")
            break
        except OSError:
            time.sleep(0.01)
    peers.append(peer)
peers += [listening.accept()[0] for _ in range(size - 1 - rank)]
print("met", flush=True)
select.select(peers, [], [])
sys.exit(f"rank {rank}: connection closed by peer")
"""


@pytest.mark.parametrize("killed", range(4))
def test_the_rank_that_was_killed_is_told_though_its_sisters_failed_before_anybody_looked(node, killed):
    node.python("j", MESH, launch="ranks", ranks=4, world_size=4, devices=(0, 1, 2, 3))
    for rank in range(4):
        node.until_printed("met", rank=rank)
    pids = [int(node.until_file(node.folder().work(0) / f"pid-{rank}")) for rank in range(4)]
    supervisor = node.supervisor_pid()
    os.kill(supervisor, signal.SIGSTOP)  # a machine so busy that the supervisor looks only when all have ended
    try:
        os.kill(pids[killed], signal.SIGKILL)
        node.until(lambda: not any(process_tree.read_status(pid) for pid in pids), "all ranks have ended")
    finally:
        os.kill(supervisor, signal.SIGCONT)
    ended = node.outcome()
    failure = ended["failure"]
    assert (ended["state"], failure["rank"], failure["kind"], failure["exit_code"]) == ("failed", killed, "signal", -9)
    assert failure["node"] == "n0"
    assert f"rank {killed} was killed by SIGKILL" in failure["message"]
    assert sorted(ended["exit_codes"].values()) == [-9, 1, 1, 1]
