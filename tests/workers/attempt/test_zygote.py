"""Supervisors forked by a zygote: as apart from each other and from the agent as those started one by one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cluster.errors import FleetError
from workers.attempt import processes, starting
from workers.attempt.records import read_json
from workers.attempt.starting import Starter

pytestmark = pytest.mark.skipif(not processes.LINUX, reason="there is a zygote on Linux only")
FOREVER = ("sh", "-c", "echo ready; exec sleep 600")


@pytest.fixture(params=["forked", "an interpreter"])
def own(node, request):
    """A starter of this test's own."""
    node.starter = Starter()
    if request.param == "forked":
        node.starter.begin()
    node.reopen()
    yield node.starter
    node.starter.close()


@pytest.fixture
def forked(node):
    node.starter = Starter()
    node.starter.begin()
    node.reopen()
    yield node.starter
    node.starter.close()


def zygote_of(starter):
    return psutil.Process(starter._zygote.pid)


def recorded(node, job="j"):
    told = read_json(node.folder(job).supervisor)
    return psutil.Process(told["supervisor"][0]), psutil.Process(told["keeper"][0])


def open_files(process):
    return sorted({str(path.readlink()) for path in Path(f"/proc/{process.pid}/fd").iterdir()})


def test_a_supervisor_is_alone_in_its_session_and_holds_nothing_of_the_agents(node, own):
    held, kept = os.pipe()
    os.set_inheritable(held, True)
    node.start(command=FOREVER)
    node.until_printed("ready")
    supervisor, keeper = recorded(node)
    assert os.getsid(supervisor.pid) == os.getsid(keeper.pid) == keeper.pid
    assert keeper.parent() is None or keeper.parent().pid not in (os.getpid(), own._zygote and own._zygote.pid)
    assert supervisor.cwd() == str(node.folder().path)
    assert set(supervisor.environ()) == {"PATH", "PYTHONPATH", "LC_ALL"}
    shown = [word for word in supervisor.cmdline() if word]
    assert shown[shown.index("-m") : shown.index("-m") + 3] == ["-m", "workers.attempt", str(node.folder().path)]
    strange = [path for path in open_files(supervisor) if path.startswith("socket:") or path == f"pipe:[{held}]"]
    assert strange == []
    lock, nothing = str(node.folder().lock), "/dev/null"
    assert [path for path in open_files(keeper) if not path.startswith("pipe:")] == sorted([lock, nothing])
    assert f"pipe:[{os.fstat(held).st_ino}]" not in open_files(keeper) + open_files(supervisor)
    os.close(held)
    os.close(kept)


def test_secrets_are_in_no_argument_and_in_no_other_process(node, forked):
    node.start(command=FOREVER, secrets={"KEY": "s3cr3t-canary"})
    node.until_printed("ready")
    seen = [
        Path(f"/proc/{p.pid}/{name}") for p in (*recorded(node), zygote_of(forked)) for name in ("cmdline", "environ")
    ]
    assert not [path for path in seen if b"s3cr3t-canary" in path.read_bytes()]


def test_what_it_started_outlives_a_zygote_that_is_killed_and_the_next_starts_by_itself(node, forked):
    node.start("first", FOREVER)
    node.until_printed("ready", "first")
    before = zygote_of(forked)
    before.kill()
    node.until_gone(before.pid)
    node.start("second", ("echo", "on"))
    assert node.outcome("second")["state"] == "succeeded"
    assert node.attempts.live()[0].id.job == "first"
    node.until(lambda: forked._zygote is not None and forked._zygote.pid != before.pid, "there is a new zygote")
    node.start("third", ("echo", "on"))
    assert node.outcome("third")["state"] == "succeeded"


def test_a_zygote_that_hangs_costs_one_start_which_leaves_nothing(node, forked, monkeypatch):
    before = zygote_of(forked)
    before.suspend()
    with monkeypatch.context() as short, pytest.raises(FleetError, match="did not start within"):
        short.setattr(starting, "START_TIMEOUT_S", 0.5)
        node.start(command=("touch", str(node.root / "ran")))
    node.until_gone(before.pid)
    assert not node.folder().path.exists()
    node.start("next", ("echo", "on"))
    assert node.outcome("next")["state"] == "succeeded"
    assert not (node.root / "ran").exists()


AGENT = """
import sys, time
from pathlib import Path
from workers.attempt.attempts import Attempts
from workers.attempt.starting import Starter
from workers.messages import Order
from workers.packages import Packages

root, starter = Path(sys.argv[1]), Starter()
starter.begin()
packages = Packages(root / "packages")
attempts = Attempts(root / "attempts", root / "storage", "n0", packages, lambda order: 1, None, starter)
attempts.start(
    Order("j", 1, "run", "cpu", "cpu", False, (0,), 0, 1, 0, 1, 1, "127.0.0.1", 1, lease_s=60.0,
          command=("sh", "-c", "echo ready; exec sleep 600")), {})
print(starter._zygote.pid, flush=True)
time.sleep(600)
"""


def test_an_agent_that_is_killed_takes_its_zygote_along_and_no_attempt(node):
    with subprocess.Popen([sys.executable, "-c", AGENT, str(node.root)], stdout=subprocess.PIPE, text=True) as agent:
        zygote = int(agent.stdout.readline())
        node.until_printed("ready")
        os.kill(agent.pid, signal.SIGKILL)
    node.until_gone(zygote)
    assert [a.id.job for a in node.reopen().live()] == ["j"]
    assert all(process.is_running() for process in recorded(node))
    assert node.attempts.news({}, {}, 5.0)[0].phase == "running"
