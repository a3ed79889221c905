"""Groups of this kernel where it lets us make one; trees of files elsewhere, as the kernel shows them."""

import os
import signal
import subprocess

import pytest
from patience import LIMIT_S

from workers.devices.discovery.machine import Machine
from workers.devices.discovery.machine_findings import health
from workers.processes import cgroup
from workers.processes.cgroup import ControlGroup
from workers.protocol.folders import read_json

SYSTEMD = "29 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
VERSION_1 = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
HYBRID = VERSION_1 + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
BOUND = "29 23 0:26 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup rw\n"


@pytest.fixture
def machine(tmp_path):
    """machine(mountinfo, own group, folder of it): the root of a file system."""

    def made(mountinfo, own, folder):
        proc = tmp_path / "proc" / "self"
        proc.mkdir(parents=True)
        (proc / "mountinfo").write_text(mountinfo)
        (proc / "cgroup").write_text(f"4:memory:/elsewhere\n0::{own}\n")
        if folder:
            (tmp_path / folder).mkdir(parents=True)
            (tmp_path / folder / "cgroup.procs").write_text("")
        return tmp_path

    return made


@pytest.mark.parametrize(
    ("mountinfo", "own", "folder"),
    [
        (SYSTEMD, "/system.slice/polyfleet.service", "sys/fs/cgroup/system.slice/polyfleet.service"),
        (SYSTEMD, "/", "sys/fs/cgroup"),
        (HYBRID, "/", "sys/fs/cgroup/unified"),
        (BOUND, "/docker/abc/own", "sys/fs/cgroup/own"),
        (SYSTEMD, "/a.service/ray-node_1f2e/user/workers", "sys/fs/cgroup/a.service"),
    ],
)
def test_groups_are_made_in_the_nodes_own_and_outside_of_rays(machine, mountinfo, own, folder):
    top = machine(mountinfo, own, folder)
    assert cgroup.find({}, top) == cgroup.Hierarchy(top / folder)


@pytest.mark.parametrize(
    ("mountinfo", "own", "why_not"),
    [
        (VERSION_1, "/", "no control groups of version 2 are mounted here"),
        (SYSTEMD, "/../outside", "no control groups of version 2 are mounted here"),
        (SYSTEMD, "/gone", "/sys/fs/cgroup/gone is not writable"),
    ],
)
def test_where_there_are_none_it_says_why(machine, mountinfo, own, why_not):
    found = cgroup.find({}, machine(mountinfo, own, ""))
    assert found.root is None
    assert found.unavailable_reason.endswith(why_not)


def test_doctor_tells_of_a_node_without_and_what_to_do(machine):
    (finding,) = health([], Machine(machine(VERSION_1, "/", ""), {}, "Linux"))
    assert (finding.level, finding.subject) == ("info", "control groups")
    assert finding.message.endswith("no control groups of version 2 are mounted here")
    assert "Delegate=yes" in finding.remedy


def test_a_service_that_systemd_has_handed_over_is_used_above_its_subgroup(machine):
    top = machine(SYSTEMD, "/a.service/main", "sys/fs/cgroup/a.service/main")
    service = top / "sys/fs/cgroup/a.service"
    (service / "cgroup.procs").write_text("")
    try:
        os.setxattr(service, "user.delegate", b"1")
    except OSError as e:
        pytest.skip(f"no extended attributes here: {e.strerror}")
    assert cgroup.find({}, top).root == service
    (service / "init.scope").mkdir()
    assert cgroup.find({}, top).root == service / "main"


def test_the_variable_names_a_group_or_none(machine, tmp_path):
    top = machine(SYSTEMD, "/", "sys/fs/cgroup")
    other = tmp_path / "other"
    other.mkdir()
    (other / "cgroup.procs").touch()
    assert cgroup.find({cgroup.ROOT: str(other)}, top).root == other
    assert cgroup.find({cgroup.ROOT: "off"}, top).root is None


def test_processes_are_limited_to_half_of_what_there_can_be_and_memory_only_if_asked(machine, tmp_path):
    top = machine(SYSTEMD, "/", "sys/fs/cgroup")
    kernel = top / "proc/sys/kernel"
    kernel.mkdir(parents=True)
    (kernel / "pid_max").write_text("4194304\n")
    (kernel / "threads-max").write_text("100000\n")
    root = top / "sys/fs/cgroup"
    assert cgroup.limits(root, {}, top) == {"pids.max": "50000"}
    (root / "pids.max").write_text("2000\n")
    assert cgroup.limits(root, {}, top) == {"pids.max": "1000"}
    asked = {cgroup.PIDS: "64", cgroup.MEMORY: "1073741824"}
    assert cgroup.limits(root, asked, top) == {"pids.max": "64", "memory.max": "1073741824"}


def test_what_the_kernel_measured_is_read(tmp_path):
    group = ControlGroup(tmp_path)
    assert (group.peak_bytes(), group.memory_limit_bytes(), group.killed_for_memory()) == (0, 0, 0)
    (tmp_path / "memory.peak").write_text("123456\n")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 31\noom 2\noom_kill 1\noom_group_kill 0\n")
    assert (group.peak_bytes(), group.memory_limit_bytes(), group.killed_for_memory()) == (123456, 0, 1)


def test_a_process_of_another_namespace_is_no_process_to_kill(tmp_path):
    (tmp_path / "cgroup.procs").write_text("0\n7\n")
    assert ControlGroup(tmp_path).members() == {7}


def test_a_rank_killed_for_memory_is_told_as_such_with_the_peak(node, monkeypatch):
    """Its group is a folder with the files of one whose memory ran out: recorded, since limits need a right."""
    root = node.root / "groups"
    recorded = root / cgroup.name(node.folder().path)
    recorded.mkdir(parents=True)
    (root / "cgroup.procs").touch()
    told = {"memory.peak": "2147483648\n", "memory.max": "2147483648\n", "memory.events": "oom 0\noom_kill 0\n"}
    for name, text in ({"cgroup.kill": ""} | told).items():
        (recorded / name).write_text(text)
    monkeypatch.setenv(cgroup.ROOT, str(root))
    node.start(command=("sh", "-c", f"echo 'oom_kill 1' > {recorded}/memory.events; kill -9 $$"))
    ended = node.outcome()
    assert (ended["failure"]["kind"], ended["peak_memory_bytes"]) == ("oom", 2 << 30)
    message = ended["failure"]["message"]
    assert message.startswith("rank 0 was killed by the kernel because memory ran out: it used ")
    assert message.endswith(", the attempt's limit is 2.0 GiB")


@pytest.fixture
def group():
    """A real one."""
    found = cgroup.find({})
    made = ControlGroup(found.root / f"polyfleet-test-{os.getpid()}") if found.root else None
    if made is None or not made.create({}):
        pytest.skip(f"no control group can be made here: {found.unavailable_reason}")
    yield made
    assert made.remove(20.0)


def test_a_group_dies_as_one_with_its_groups_below(node, group):
    (group.path / "below").mkdir()
    shell = subprocess.Popen(["sh", "-c", "read go; setsid env -i sleep 600 & wait"], stdin=subprocess.PIPE)
    try:
        (group.path / "below" / "cgroup.procs").write_text(str(shell.pid))
        shell.stdin.write(b"\n")
        shell.stdin.close()
        node.until(lambda: len(group.members()) == 2, "both are in the group")
        assert group.remove(20.0)
        assert shell.wait(LIMIT_S) == -signal.SIGKILL
    finally:
        shell.kill()
        shell.wait()
    assert group.members() == set()


def test_an_attempt_runs_in_its_own_group_and_its_supervisor_outside(node, group, monkeypatch):
    monkeypatch.setenv(cgroup.ROOT, str(group.path))
    node.start(command=("sh", "-c", "echo ready; exec sleep 600"))
    node.until_printed("ready")
    (its,) = [ControlGroup(path) for path in group.path.iterdir() if path.is_dir()]
    (rank,) = its.members()
    assert node.supervisor_pid() not in group.members()
    os.kill(rank, signal.SIGKILL)
    assert node.outcome()["state"] == "failed"
    node.until(lambda: not its.path.exists(), "its group is removed")


def test_where_the_kernel_refuses_a_group_the_attempt_runs_without(node, monkeypatch):
    root = node.root / "no-groups"
    root.mkdir()
    (root / "cgroup.procs").touch()
    monkeypatch.setenv(cgroup.ROOT, str(root))
    node.start(command=("true",))
    assert node.outcome()["state"] == "succeeded"
    assert not read_json(node.folder().launch)["cgroup"]
    assert list(root.iterdir()) == [root / "cgroup.procs"]
