import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil

from cluster.processes import alive, free_port, identify, start_detached, stop


def sleeper(tmp_path: Path, code: str = "import time; time.sleep(300)") -> object:
    return start_detached([sys.executable, "-c", code], env={}, cwd=tmp_path, log=tmp_path / "log")


def test_a_detached_process_leads_a_session_of_its_own_and_writes_to_its_log(tmp_path: Path):
    process = sleeper(tmp_path, "import os; print(os.getsid(0) == os.getpid(), flush=True)")
    psutil.Process(process.pid).wait(30)
    assert (tmp_path / "log").read_text() == "True\n"
    assert not alive(process)


def test_a_process_of_another_start_time_is_not_the_same(tmp_path: Path):
    process = sleeper(tmp_path)
    boot, _, ticks = str(process.created).rpartition(":")
    stranger = replace(process, created=f"{boot}:{int(ticks) - 6000}")
    assert alive(process) and not alive(stranger)
    assert stop([stranger]) == 0 and alive(process)
    stop([process])
    assert not alive(process)


def test_stop_takes_the_whole_family_even_who_ignores_sigterm(tmp_path: Path):
    code = """if True:
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]).pid, flush=True)
        time.sleep(300)
    """
    parent = sleeper(tmp_path, code)
    while not (told := (tmp_path / "log").read_text()):
        assert alive(parent)
    child = identify(int(told))
    assert stop([parent], grace_s=0.2) >= 1
    assert not alive(parent) and not alive(child)


def test_a_zombie_is_not_alive():
    child = subprocess.Popen([sys.executable, "-c", ""])
    process = identify(child.pid)
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    assert not alive(process)
    child.wait()


def test_free_ports_can_be_bound():
    assert 0 < free_port() < 65536
