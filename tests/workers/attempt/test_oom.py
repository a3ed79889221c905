"""Memory that runs out for real: ranks in a memory-limited control group of this kernel, killed by it."""

import os
import shlex
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from workers.attempt.supervision import outcome
from workers.attempt.supervisor_launcher import SupervisorLauncher
from workers.processes import oom as memory_
from workers.processes import process_tree
from workers.processes.cgroup import ControlGroup
from workers.processes.oom import OomMonitor

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
LIMIT_BYTES = 96 << 20
PYTHON = shlex.quote(sys.executable)
GROWS = """
import os, pathlib, time
print("ready", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.01)
kept = []
while True:
    kept.append(bytearray(1 << 20))
"""
WAITS = "import os; open('pid', 'w').write(str(os.getpid())); print('ready', flush=True); import time; time.sleep(600)"


@pytest.fixture
def limited():
    """A real control group with a limit of memory: its folder. `inside` moves this process there for a while."""
    root, limit = (V1, "memory.limit_in_bytes") if (V1 / "memory.limit_in_bytes").exists() else (V2, "memory.max")
    group = root / f"polyfleet-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(LIMIT_BYTES))
    except OSError as e:
        group.is_dir() and group.rmdir()
        pytest.skip(f"no control group with a limit of memory can be made here: {e}")
    yield group
    group.rmdir()


@contextmanager
def inside(group):
    """What this process starts meanwhile is a member of `group`."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    path = next(line.split(":", 2)[2] for line in lines if ":memory:" in line or line.startswith("0::"))
    own = group.parent / path.lstrip("/") / "cgroup.procs"
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        own.write_text(str(os.getpid()))


def gone(node, group):
    node.until(lambda: not (group / "cgroup.procs").read_text().strip(), "the group is empty")


def test_a_rank_killed_by_the_kernel_in_the_nodes_own_limit_is_told_with_peak_and_limit(node, limited):
    node.starter = SupervisorLauncher()  # no zygote: that of all tests was started outside of the group
    node.reopen()
    with inside(limited):
        node.python("j", GROWS)
    node.until_printed("ready")
    (node.folder().work(0) / "go").touch()
    ended = node.outcome()
    failure = ended["failure"]
    assert (ended["state"], failure["kind"], failure["exit_code"], failure["node"]) == ("failed", "oom", -9, "n0")
    assert failure["message"].startswith("rank 0 was killed by the kernel because memory ran out: it used ")
    assert failure["message"].endswith("MiB, the limit of its control group is 96 MiB")
    assert LIMIT_BYTES // 2 < ended["peak_memory_bytes"] < 2 * LIMIT_BYTES
    gone(node, limited)


def test_a_rank_killed_in_a_group_that_nobody_told_us_of_is_found_in_the_kernels_counters(node, limited):
    script = f"echo $$ > {limited}/cgroup.procs; exec {PYTHON} -c '{GROWS}'"
    node.start(command=("sh", "-c", script))
    node.until_printed("ready")
    (node.folder().work(0) / "go").touch()
    failure = node.outcome()["failure"]
    assert (failure["kind"], failure["exit_code"]) == ("oom", -9)
    assert "the node has" in failure["message"]
    gone(node, limited)


def test_a_shell_whose_program_ran_out_of_memory_is_told_so(node, limited):
    script = f"echo $$ > {limited}/cgroup.procs; {PYTHON} -c '{GROWS}'; exit $?"
    node.start(command=("sh", "-c", script))
    node.until_printed("ready")
    (node.folder().work(0) / "go").touch()
    failure = node.outcome()["failure"]
    assert (failure["kind"], failure["exit_code"]) == ("oom", 137)
    gone(node, limited)


def test_a_rank_killed_by_a_person_is_not_told_as_out_of_memory_though_another_program_was(node, limited):
    """The counters are the machine's: only the kernel's log says who it was."""
    if not os.access("/dev/kmsg", os.R_OK):
        pytest.skip("the kernel's log cannot be read here")
    node.python("j", WAITS)
    pid = int(node.until_file(node.folder().work(0) / "pid"))
    script = f"echo $$ > {limited}/cgroup.procs; exec {PYTHON} -c 'x = bytearray({2 * LIMIT_BYTES})'"
    assert subprocess.run(["sh", "-c", script]).returncode == -9
    os.kill(pid, 9)
    failure = node.outcome()["failure"]
    assert (failure["kind"], failure["exit_code"]) == ("signal", -9)


def test_a_process_that_was_killed_long_ago_and_that_the_job_survived_makes_no_later_failure_oom(tmp_path, monkeypatch):
    """The group counts from its start; a folder with the kernel's file stands for it."""
    counts, nan = tmp_path / "memory.events", {"kind": "nan", "message": "the loss is nan"}
    counts.write_text("oom 0\noom_kill 0\n")
    memory = OomMonitor(ControlGroup(tmp_path))
    monkeypatch.setattr(memory_, "SAMPLE_EVERY_S", 0.0)
    counts.write_text("oom 1\noom_kill 1\n")
    seen = outcome.FailedRank(0, "n0", 1, 1, nan, "", False, "", 0)
    assert outcome.cause(seen, memory).kind == "oom"
    memory.sample()
    memory.sample()
    assert outcome.cause(seen, memory).kind == "nan"
    counts.write_text("oom 2\noom_kill 2\n")
    assert outcome.cause(seen, memory).kind == "oom"


def test_the_kernel_is_to_kill_ranks_before_the_supervisor_that_tells_of_it(node):
    own = Path("/proc/self/oom_score_adj")
    before = own.read_text()
    own.write_text("1000")  # as Ray does with an agent
    try:
        node.python("j", WAITS)
    finally:
        try:
            own.write_text(before)
        except OSError as e:
            pytest.skip(f"this process cannot go back: {e}")
    rank, supervisor = node.until_file(node.folder().work(0) / "pid"), node.supervisor_pid()
    keeper = process_tree.read_status(supervisor).parent
    scores = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (rank, supervisor, keeper)]
    assert scores == [1000, 0, 0]


def test_the_peak_of_an_attempt_without_a_control_group_is_what_its_ranks_held(node):
    node.python("j", "x = bytearray(64 << 20)", ranks=2, world_size=2, devices=(0, 1))
    assert 128 << 20 < node.outcome()["peak_memory_bytes"] < 512 << 20
