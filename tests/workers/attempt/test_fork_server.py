"""Supervisors forked by a zygote: as apart from each other and from the agent as those started one by one."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from patience import LIMIT_S

from cluster.errors import FleetError
from workers.attempt import folder_setup, supervisor_launcher
from workers.attempt.supervision.exec_commands import SOCKET_NAME
from workers.attempt.supervisor_launcher import SupervisorLauncher
from workers.processes import cgroup, process_tree
from workers.protocol.folders import read_json

pytestmark = pytest.mark.skipif(not process_tree.LINUX, reason="there is a zygote on Linux only")
FOREVER = ("sh", "-c", "echo ready; exec sleep 600")


@pytest.fixture(params=["forked", "an interpreter"])
def own(node, request):
    """A starter of this test's own."""
    node.starter = SupervisorLauncher()
    if request.param == "forked":
        node.starter.start()
    node.reopen()
    yield node.starter
    node.starter.close()


@pytest.fixture
def forked(node):
    node.starter = SupervisorLauncher()
    node.starter.start()
    node.reopen()
    yield node.starter
    node.starter.close()


def zygote_of(starter):
    return psutil.Process(starter._fork_server.pid)


def recorded(node, job="j"):
    told = read_json(node.folder(job).supervisor)
    return psutil.Process(told["supervisor"][0]), psutil.Process(told["reaper"][0])


def open_files(process):
    return sorted({str(path.readlink()) for path in Path(f"/proc/{process.pid}/fd").iterdir()})


def doors():
    """Where supervisors take commands beside their ranks."""
    rows = Path("/proc/net/unix").read_text().splitlines()
    return {f"socket:[{row.split()[6]}]" for row in rows if row.endswith(f" {SOCKET_NAME}")}


def test_a_supervisor_is_alone_in_its_session_and_holds_nothing_of_the_agents(node, own):
    held, kept = os.pipe()
    os.set_inheritable(held, True)
    node.start(command=FOREVER)
    node.until_printed("ready")
    supervisor, keeper = recorded(node)
    assert os.getsid(supervisor.pid) == os.getsid(keeper.pid) == keeper.pid
    assert keeper.parent() is None or keeper.parent().pid not in (
        os.getpid(),
        own._fork_server and own._fork_server.pid,
    )
    assert supervisor.cwd() == str(node.folder().path)
    assert set(supervisor.environ()) == {"PATH", "PYTHONPATH", "LC_ALL"}
    shown = [word for word in supervisor.cmdline() if word]
    assert shown[shown.index("-m") : shown.index("-m") + 3] == ["-m", "workers.attempt", str(node.folder().path)]
    strange = [path for path in open_files(supervisor) if path.startswith("socket:") or path == f"pipe:[{held}]"]
    assert [path for path in strange if path not in doors()] == []
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
    assert node.attempts.live_attempts()[0].id.job == "first"
    node.until(
        lambda: forked._fork_server is not None and forked._fork_server.pid != before.pid, "there is a new zygote"
    )
    node.start("third", ("echo", "on"))
    assert node.outcome("third")["state"] == "succeeded"


def test_a_zygote_that_hangs_costs_one_start_which_leaves_nothing(node, forked, monkeypatch):
    before = zygote_of(forked)
    before.suspend()
    with monkeypatch.context() as short, pytest.raises(FleetError, match="did not start within"):
        short.setattr(supervisor_launcher, "START_TIMEOUT_S", 0.5)
        node.start(command=("touch", str(node.root / "ran")))
    node.until_gone(before.pid)
    assert not node.folder().path.exists()
    node.start("next", ("echo", "on"))
    assert node.outcome("next")["state"] == "succeeded"
    assert not (node.root / "ran").exists()


@pytest.fixture
def prepared(monkeypatch):
    """`prepared[job] = act`: `act` is called once the folder of this job is prepared, before its supervisor begins."""
    acts, prepare = {}, folder_setup.create_folder

    def and_then(folder, order, *more):
        prepare(folder, order, *more)
        acts.get(order.job, lambda: None)()

    monkeypatch.setattr(folder_setup, "create_folder", and_then)
    return acts


def waiting(node, job):
    """The supervisor that was forked for the job, and waits for its secrets."""
    found = []

    def look():
        path, seen = str(node.folder(job).path), psutil.process_iter(["cmdline", "ppid"])
        shown = [process for process in seen if path in (process.info["cmdline"] or ())]
        found[:] = [p for p in shown if p.info["ppid"] in {other.pid for other in shown}]
        return found

    node.until(look, f"{job} has a supervisor")
    return found[-1]


def test_a_supervisor_that_comes_too_late_ends_before_its_start_is_told_to_have_failed(
    node, forked, prepared, monkeypatch
):
    """Else it runs its ranks beside those of the start that comes next, until its lease has passed."""
    late, replaced, folder = [], SupervisorLauncher._replace, node.folder()

    def suspend():
        late.append(waiting(node, "j"))
        late[0].suspend()

    def resume_meanwhile(*given, **how):
        late[0].resume()
        node.until(
            lambda: folder.started.exists() or process_tree.read_status(late[0].pid) is None, "it runs, or has ended"
        )
        replaced(*given, **how)

    prepared["j"] = suspend
    monkeypatch.setenv(cgroup.ROOT, "off")
    monkeypatch.setattr(supervisor_launcher, "START_TIMEOUT_S", 0.5)
    monkeypatch.setattr(SupervisorLauncher, "_replace", resume_meanwhile)
    with pytest.raises(FleetError, match="did not start within"):
        node.start(command=FOREVER, lease_s=600.0)
    assert process_tree.attempt_processes([], folder.shared) == set()
    assert process_tree.read_status(late[0].pid) is None
    assert not folder.path.exists()


def test_a_supervisor_that_runs_when_its_start_fails_is_ended_with_its_ranks(node, forked, monkeypatch):
    """It was so slow to say that it is there that nobody listened any more."""
    exchange, known = supervisor_launcher._Pipes.exchange, []

    def too_late(pipes, secrets):
        exchange(pipes, secrets)
        node.until_printed("ready")
        known.extend(recorded(node))
        raise TimeoutError

    monkeypatch.setenv(cgroup.ROOT, "off")
    monkeypatch.setattr(supervisor_launcher._Pipes, "exchange", too_late)
    with pytest.raises(FleetError, match="did not start within"):
        node.start(command=FOREVER, lease_s=600.0)
    assert process_tree.attempt_processes([], node.folder().shared) == set()
    for process in known:
        node.until_gone(process.pid)


def test_a_supervisor_that_fails_takes_no_start_beside_it_along(node, forked, prepared):
    """What the zygote is asked for by then it still starts, and those that come next have another."""
    before, prepared_b, failed, go = zygote_of(forked), threading.Event(), [], threading.Event()
    prepared["a"], prepared["b"] = lambda: go.wait(LIMIT_S), prepared_b.set

    def start_a():
        try:
            node.start("a", FOREVER)
        except FleetError as e:
            failed.append(e)

    starts = [threading.Thread(target=start_a), threading.Thread(target=node.start, args=("b", FOREVER))]
    starts[0].start()
    doomed = waiting(node, "a")
    before.suspend()
    starts[1].start()
    assert prepared_b.wait(LIMIT_S)
    doomed.kill()
    go.set()
    starts[0].join(LIMIT_S)
    assert "a.1.0 did not start" in failed[0].message
    before.resume()
    starts[1].join(LIMIT_S)
    node.until_printed("ready", "b")
    node.until_gone(before.pid)
    assert node.attempts.keys() == ["b.1.0"]
    assert zygote_of(forked).pid != before.pid


AGENT = """
import sys, time
from pathlib import Path
from workers.attempt.attempts import AttemptManager
from workers.attempt.supervisor_launcher import SupervisorLauncher
from workers.protocol.messages import Order
from workers.storage.code_archives import NodeCodeArchives

root, starter = Path(sys.argv[1]), SupervisorLauncher()
starter.start()
packages = NodeCodeArchives(root / "packages")
attempts = AttemptManager(root / "attempts", root / "storage", "n0", packages, lambda order: 1, None, starter)
attempts.start(
    Order("j", 1, "run", "cpu", "cpu", False, (0,), 0, 1, 0, 1, 1, "127.0.0.1", 1, lease_s=600.0,
          command=("sh", "-c", "echo ready; exec sleep 600")), {})
print(starter._fork_server.pid, flush=True)
time.sleep(600)
"""


def test_an_agent_that_is_killed_takes_its_zygote_along_and_no_attempt(node):
    with subprocess.Popen([sys.executable, "-c", AGENT, str(node.root)], stdout=subprocess.PIPE, text=True) as agent:
        zygote = int(agent.stdout.readline())
        node.until_printed("ready")
        os.kill(agent.pid, signal.SIGKILL)
    node.until_gone(zygote)
    assert [a.id.job for a in node.reopen().live_attempts()] == ["j"]
    assert all(process.is_running() for process in recorded(node))
    assert node.attempts.wait_for_changes({}, {}, 5.0)[0].phase == "running"
