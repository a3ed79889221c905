import os
import subprocess
import sys

import psutil
import pytest

from workers.attempt import processes


@pytest.fixture
def family(tmp_path):
    """A marked child and its unmarked grandchild; yields their pids."""
    code = "import subprocess; p = subprocess.Popen(['env', '-i', 'sleep', '600']); print(p.pid, flush=True); p.wait()"
    environ = {**os.environ, processes.MARK: str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True) as child:
        yield child.pid, int(child.stdout.readline())
        processes.kill_tree(0, tmp_path)


def test_a_tree_holds_who_is_marked_and_who_descends_from_them(family, tmp_path):
    assert processes.tree(0, tmp_path) == set(family)
    assert set(family) <= processes.tree(os.getpid(), tmp_path / "other")


def test_the_mark_is_the_whole_folder_not_its_beginning(family, tmp_path):
    assert processes.tree(0, tmp_path.with_name(tmp_path.name[:-1])) == set()


def test_killing_a_tree_leaves_nobody(family, tmp_path):
    assert processes.kill_tree(0, tmp_path) == set()
    assert processes.tree(0, tmp_path) == set()


def test_a_signal_to_somebody_gone_is_no_error(family, tmp_path):
    processes.kill_tree(0, tmp_path)
    psutil.Process(family[0]).wait()
    processes.send(family[0], 15)
    processes.send(family[0], 15, group=True)


def test_start_times_are_psutils():
    assert abs(processes.created_s(os.getpid()) - psutil.Process().create_time()) < 0.011
