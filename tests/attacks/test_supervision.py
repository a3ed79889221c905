"""Job code against its own supervisor: whatever it does, the attempt ends, and no process of it is left."""

import os
import runpy
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from patience import LIMIT_S

from workers.protocol import fence, lease

HERE = Path(__file__).parent
AT_WORK = runpy.run_path(str(HERE.parent / "workers" / "attempt" / "conftest.py"))
alive = AT_WORK["alive"]
SLEEP = "import time; time.sleep(600)"

# Twice removed from the rank, as a program that nothing tells the attempt of, it notes its pid and does `deed`.
DAEMON = """
import os, sys
supervisor = os.getppid()
keeper = open(f"/proc/{supervisor}/stat").read().rpartition(")")[2].split()[1]
if os.fork() == 0:
    LEAVE
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, "-S", "-c", sys.argv[1], str(supervisor), keeper, sys.argv[2]], {})
    os._exit(0)
import time; time.sleep(600)
"""
PROGRAM = """
import os, signal, sys, time
supervisor, keeper = int(sys.argv[1]), int(sys.argv[2])
open(sys.argv[3], "w").write(str(os.getpid()))
DEED
time.sleep(600)
"""
KILL, KILL_BOTH = "os.kill(supervisor, 9)", "os.kill(keeper, 9); os.kill(supervisor, 9)"


def daemon(deed, pid_file, leave="os.setsid()"):
    return sys.executable, "-c", DAEMON.replace("LEAVE", leave), PROGRAM.replace("DEED", deed), str(pid_file)


@pytest.fixture(scope="module")
def zygote():
    """Starts supervisors as an agent does."""
    AT_WORK["STARTER"].start()
    yield
    AT_WORK["STARTER"].close()


@pytest.fixture
def node(tmp_path, zygote):
    it = AT_WORK["Node"](tmp_path)
    yield it
    it.close()


@pytest.fixture(params=["no control groups", "a control group each"])
def groups(request, tmp_path, monkeypatch):
    """The folder that the attempts' control groups are made in; None in the runs without."""
    if request.param == "no control groups":
        monkeypatch.setenv("POLYFLEET_CGROUP_ROOT", "off")
        yield None
        return
    mount = tmp_path / "cgroup2"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "cgroup2", "none", mount], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"control groups of version 2 cannot be mounted here: {made.stderr.strip()}")
    root = mount / f"polyfleet-test-{os.getpid()}"
    root.mkdir()
    monkeypatch.setenv("POLYFLEET_CGROUP_ROOT", str(root))
    yield root
    for folder in (*root.glob("*/"), root):
        folder.rmdir()
    subprocess.run(["umount", mount], check=True)


def ended(node, job="j"):
    """Its outcome, while the controller is heard all the time."""

    def over():
        node.attempts.renew()
        node.attempts.wait_for_changes({}, {}, 0.0)
        return node.folder(job).outcome.exists()

    node.until(over, f"{job} ended")
    return AT_WORK["read_json"](node.folder(job).outcome)


def nothing_is_left(node, groups, *pids):
    node.until(lambda: not any(alive(pid) for pid in pids), f"{pids} are gone")
    node.until(lambda: groups is None or not list(groups.glob("polyfleet-*")), "its control group is removed")
    assert node.reopen().live_attempts() == []


def until_stopped(node, pid):
    node.until(lambda: "T (stopped)" in Path(f"/proc/{pid}/status").read_text(), f"process {pid} is stopped")


def recorded(node, job="j"):
    supervisor = node.supervisor_pid(job)
    return supervisor, int(Path(f"/proc/{supervisor}/stat").read_text().rpartition(")")[2].split()[1])


def test_what_kills_its_supervisor_and_clears_its_environment_dies(node, groups, tmp_path):
    node.start(command=daemon(KILL, tmp_path / "pid"))
    pid = node.until_file(tmp_path / "pid")
    node.attempts.stop("j", 1, "cancel")
    assert ended(node)["state"] == "lost"
    nothing_is_left(node, groups, pid)


@pytest.mark.parametrize("leave", ["pass", "os.setsid()"])
def test_what_kills_its_supervisor_and_the_keeper_dies(node, groups, tmp_path, leave):
    if groups is None and leave != "pass":
        pytest.skip("without control groups, who also leaves the session is not found: see SECURITY.md")
    node.start(command=daemon(KILL_BOTH, tmp_path / "pid", leave))
    pid = node.until_file(tmp_path / "pid")
    assert ended(node)["state"] == "lost"
    nothing_is_left(node, groups, pid)


def test_a_supervisor_that_is_stopped_again_and_again_loses_its_attempt_with_the_lease(node, groups, tmp_path):
    deed = "while True: os.kill(supervisor, signal.SIGSTOP); time.sleep(0.01)"
    node.start(command=daemon(deed, tmp_path / "pid"))
    pid = node.until_file(tmp_path / "pid")
    supervisor, keeper = recorded(node)
    until_stopped(node, supervisor)  # the lease of one that runs is renewed
    lease.write(node.folder().lease, 0.5)
    assert ended(node)["state"] == "lost"
    nothing_is_left(node, groups, pid, supervisor, keeper)


def test_a_stopped_supervisor_obeys_cancel(node, groups):
    node.python("j", f"import os, signal; os.kill(os.getppid(), signal.SIGSTOP); print('x'); {SLEEP}")
    node.until(lambda: node.folder().supervisor.exists(), "it is on record")
    supervisor = node.supervisor_pid()
    until_stopped(node, supervisor)
    node.attempts.stop("j", 1, "cancel")
    assert ended(node)["state"] == "cancelled"
    nothing_is_left(node, groups, supervisor)


def test_a_supervisor_whose_keeper_is_killed_goes_on_and_ends_as_asked(node, groups):
    node.start(command=("sh", "-c", "echo ready; exec sleep 600"))
    node.until_printed("ready")
    supervisor, keeper = recorded(node)
    os.kill(keeper, 9)
    node.until_gone(keeper)
    node.attempts.stop("j", 1, "cancel")
    assert ended(node)["state"] == "cancelled"
    nothing_is_left(node, groups, supervisor)


def test_a_lock_held_by_somebody_else_is_no_sign_of_life(node, groups, tmp_path):
    node.start(command=("sh", "-c", "echo ready; exec sleep 600"))
    node.until_printed("ready")
    supervisor, keeper = recorded(node)
    code = "import fcntl, sys, time; f = open(sys.argv[1], 'r+'); fcntl.flock(f, fcntl.LOCK_EX); "
    code += "open(sys.argv[2], 'w').write('x'); time.sleep(600)"
    holder = subprocess.Popen([sys.executable, "-c", code, node.folder().lock, tmp_path / "held"])
    try:
        os.kill(supervisor, 9)
        node.until_file(tmp_path / "held")
        node.reopen()
        assert ended(node)["state"] == "lost"
        assert lease.is_locked(node.folder().lock)
    finally:
        holder.kill()
        holder.wait()
    nothing_is_left(node, groups, keeper)


def test_without_its_record_a_supervisor_is_still_known_to_its_agent(node, groups, tmp_path):
    node.start(command=daemon("pass", tmp_path / "pid"))
    pid = node.until_file(tmp_path / "pid")
    node.attempts.wait_for_changes({}, {}, 0.0)
    supervisor, keeper = recorded(node)
    node.folder().supervisor.write_text("[" * 1000)
    os.kill(supervisor, 9)
    assert ended(node)["state"] == "lost"
    nothing_is_left(node, groups, pid, keeper)


def test_what_goes_wrong_with_one_attempt_at_the_fence_does_not_concern_the_next(node):
    for job in ("a", "b"):
        node.start(job, ("sh", "-c", "echo ready; exec sleep 600"))
        node.until_printed("ready", job)
    broken, sound = sorted(node.attempts.live_attempts(), key=lambda attempt: attempt.id)
    lease.write(sound.folder.lease, 30.0)
    broken.folder.lease.unlink()
    broken.folder.lease.mkdir()
    broken.folder.stop.unlink(missing_ok=True)
    broken.folder.stop.mkdir()
    fences = fence.FenceReader(stored=lambda key, _limit_s: b"9" if key.endswith("/a") else None)
    watching = threading.Thread(target=fence.renew_or_stop, args=([broken, sound], fences))
    watching.start()
    watching.join(LIMIT_S)
    assert lease.deadline_s(sound.folder.lease) > lease.now_s() + 50
    assert ended(node, "a")["state"] in ("lost", "cancelled")
