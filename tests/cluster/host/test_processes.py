import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from patience import LIMIT_S

from cluster.host.processes import (
    ProcessId,
    age_s,
    free_port,
    identify,
    is_alive,
    kill,
    kill_trees,
    processes_of_module,
    start_detached,
    stop,
    with_descendants,
)

ROOT = Path(__file__).parents[3]
STEPPED = """
import sys
from pathlib import Path
import psutil
from cluster.host.processes import ProcessId, age_s, is_alive
process = ProcessId(int(sys.argv[1]), sys.argv[2])
print(psutil.Process(process.pid).create_time() - float(sys.argv[3]), is_alive(process), age_s(process) < 60)
"""
"""Said by a process that sees another boot time, as every one does after a step of the clock."""


def sleeper(tmp_path: Path, code: str = "import time; time.sleep(300)") -> object:
    return start_detached([sys.executable, "-c", code], env={}, cwd=tmp_path, log=tmp_path / "log")


def test_a_detached_process_leads_a_session_of_its_own_and_writes_to_its_log(tmp_path: Path):
    process = sleeper(tmp_path, "import os; print(os.getsid(0) == os.getpid(), flush=True)")
    psutil.Process(process.pid).wait(LIMIT_S)
    assert (tmp_path / "log").read_text() == "True\n"
    assert not is_alive(process)


def test_a_process_of_another_start_time_is_not_the_same(tmp_path: Path):
    process = sleeper(tmp_path)
    boot, _, ticks = str(process.created).rpartition(":")
    stranger = replace(process, created=f"{boot}:{int(ticks) - 6000}")
    assert is_alive(process) and not is_alive(stranger)
    assert stop([stranger]) == 0 and is_alive(process)
    stop([process])
    assert not is_alive(process)


def test_a_step_of_the_clock_makes_no_process_another(tmp_path: Path):
    """The kernel tells start times as ticks since boot, and the boot time by the clock: that is what a step moves."""
    process = sleeper(tmp_path)
    lines = Path("/proc/stat").read_text().splitlines()
    boot_s = int(next(line for line in lines if line.startswith("btime")).split()[1])
    (tmp_path / "stat").write_text(Path("/proc/stat").read_text().replace(f"btime {boot_s}", f"btime {boot_s - 3600}"))
    mounted = f'mount --bind {tmp_path}/stat /proc/stat && exec "$@"'
    told = [str(process.pid), str(process.created), str(psutil.Process(process.pid).create_time())]
    command = ["unshare", "--mount", "sh", "-c", mounted, "sh", sys.executable, "-c", STEPPED, *told]
    said = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    stop([process])
    if "unshare" in said.stderr or "mount" in said.stderr:
        pytest.skip(f"needs the right to mount: {said.stderr.strip()}")
    assert said.stdout.split() == ["-3600.0", "True", "True"], said.stderr


def test_where_the_system_has_no_ticks_a_process_starts_at_epoch_seconds(tmp_path: Path):
    process = sleeper(tmp_path)
    created_s = psutil.Process(process.pid).create_time()
    assert is_alive(ProcessId(process.pid, created_s)) and not is_alive(ProcessId(process.pid, created_s - 60))
    stop([process])


def test_a_process_is_as_old_as_it_is_and_not_older_once_it_is_gone(tmp_path: Path):
    process = sleeper(tmp_path)
    assert 0.0 <= age_s(process) < 60.0
    stop([process])
    psutil.Process(process.pid).wait(LIMIT_S)
    assert age_s(process) == 0.0


def test_a_module_is_running_where_python_runs_it_and_not_where_it_is_named(tmp_path: Path):
    (tmp_path / "idle.py").write_text("import sys; sys.stdin.read()")
    words = [[sys.executable, "-s", "-m", "idle", "a", "b"], [sys.executable, "-c", "input()", "-m", "idle"]]
    words.append(["sh", "-s", "-m", "idle"])
    started = [
        subprocess.Popen(given, cwd=tmp_path, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) for given in words
    ]
    found = [(process.pid, arguments) for process, arguments in processes_of_module("idle")]
    for process in started:
        process.kill()
        process.communicate()
    assert found == [(started[0].pid, ["a", "b"])]


def test_stop_takes_the_whole_family_even_who_ignores_sigterm(tmp_path: Path):
    code = """if True:
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]).pid, flush=True)
        time.sleep(300)
    """
    parent = sleeper(tmp_path, code)
    while not (told := (tmp_path / "log").read_text()):
        assert is_alive(parent)
    child = identify(int(told))
    assert stop([parent], grace_s=0.2) >= 1
    assert not is_alive(parent) and not is_alive(child)


def test_a_zombie_is_not_alive():
    child = subprocess.Popen([sys.executable, "-c", ""])
    process = identify(child.pid)
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    assert not is_alive(process)
    child.wait()


def test_free_ports_can_be_bound():
    assert 0 < free_port() < 65536


def test_what_a_stopped_process_started_for_good_lives_on(tmp_path: Path):
    """As the nodes that a server had to start again are its children."""
    starts = (
        "import subprocess, sys, time, pathlib\n"
        "node = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], start_new_session=True)\n"
        "pathlib.Path('pid').write_text(str(node.pid)); print('started', flush=True); time.sleep(300)\n"
    )
    server = sleeper(tmp_path, starts)
    while "started" not in (tmp_path / "log").read_text():
        assert is_alive(server)
    node = identify(int((tmp_path / "pid").read_text()))
    stop([server], grace_s=5, exclude=[node])
    assert is_alive(node) and not is_alive(server)
    stop([node])


def test_a_killed_family_hears_nothing_before(tmp_path: Path):
    deaf = "import signal, subprocess, sys, time; signal.signal(15, lambda *_: print('told', flush=True)); "
    child = f"subprocess.Popen([sys.executable, '-c', {deaf + 'print(1, flush=True); time.sleep(300)'!r}])"
    parent = start_detached(
        [sys.executable, "-c", f"{deaf}{child}; time.sleep(300)"], env={}, cwd=tmp_path, log=tmp_path / "log"
    )
    while not (tmp_path / "log").read_text():
        pass
    members = with_descendants([parent])
    kill_trees([parent])
    assert len(members) == 2 and not any(m.is_running() and m.status() != psutil.STATUS_ZOMBIE for m in members)
    assert (tmp_path / "log").read_text() == "1\n"
    assert not kill([parent])
