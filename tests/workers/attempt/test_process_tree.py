import os
import subprocess
import sys

import psutil
import pytest

from workers.processes import process_tree


@pytest.fixture
def family(tmp_path):
    """A marked child and its unmarked grandchild; yields their pids."""
    code = "import subprocess; p = subprocess.Popen(['env', '-i', 'sleep', '600']); print(p.pid, flush=True); p.wait()"
    environ = {**os.environ, process_tree.MARK: str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True) as child:
        yield child.pid, int(child.stdout.readline())
        kill(tmp_path)


def kill(folder):
    return process_tree.kill_tree(lambda: process_tree.attempt_processes([], folder))


def test_a_tree_holds_who_is_marked_and_who_descends_from_them(family, tmp_path):
    assert process_tree.attempt_processes([], tmp_path) == set(family)
    assert set(family) <= process_tree.attempt_processes([os.getpid()], tmp_path / "other")


def test_the_mark_is_the_whole_folder_not_its_beginning(family, tmp_path):
    assert process_tree.attempt_processes([], tmp_path.with_name(tmp_path.name[:-1])) == set()


def test_killing_a_tree_leaves_nobody(family, tmp_path):
    assert kill(tmp_path) == set()
    assert process_tree.attempt_processes([], tmp_path) == set()


def test_a_signal_to_somebody_gone_is_no_error(family, tmp_path):
    kill(tmp_path)
    psutil.Process(family[0]).wait()
    process_tree.send(family[0], 15)
    process_tree.send(family[0], 15, group=True)


def test_a_process_is_told_from_another_with_its_number_and_from_one_before_the_machine_started_anew():
    us = process_tree.identify(os.getpid())
    assert process_tree.status_of(us) is not None
    assert process_tree.status_of(us._replace(ticks=us.ticks - 1)) is None
    assert process_tree.status_of(us._replace(boot="another")) is None


def test_a_process_that_has_ended_is_gone_also_while_nobody_has_waited_for_it():
    with subprocess.Popen(["sleep", "600"]) as child:
        known = process_tree.identify(child.pid)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_tree.status_of(known) is None


def test_who_a_session_leader_left_behind_belongs_to_its_session(tmp_path):
    script = "env -i sleep 600 & echo $!"
    with subprocess.Popen(["sh", "-c", "read go; " + script], start_new_session=True, text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as leader:  # fmt: skip
        session = process_tree.identify(leader.pid)
        leader.stdin.write("\n")
        leader.stdin.flush()
        orphan = int(leader.stdout.readline())
        leader.wait()
        assert process_tree.attempt_processes([], tmp_path, session) == {orphan}
        assert process_tree.attempt_processes([], tmp_path, session._replace(boot="another")) == set()
        process_tree.kill_tree(lambda: process_tree.attempt_processes([], tmp_path, session))
