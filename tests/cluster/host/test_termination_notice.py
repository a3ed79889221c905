"""A node that is told to end: its notice, and the attempts that it waits for."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patience import LIMIT_S

from cluster.host import termination_notice
from cluster.host.processes import ProcessId, start_detached, stop

ROOT = Path(__file__).parents[3]
SUPERVISOR = "import sys, time\nprint('runs', flush=True)\ntime.sleep(300)\n"


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Callable[[Path], ProcessId]]:
    """`attempt(folder)` starts what looks like the supervisor of an attempt in `folder`."""
    module = tmp_path / "code" / "workers" / "attempt"
    module.mkdir(parents=True)
    (module / "__main__.py").write_text(SUPERVISOR)
    started = []

    def start(folder: Path) -> ProcessId:
        log = tmp_path / f"log-{len(started)}"
        command = [sys.executable, "-m", "workers.attempt", str(folder), "3"]
        started.append(start_detached(command, env={}, cwd=tmp_path / "code", log=log))
        while not log.read_bytes():
            pass
        return started[-1]

    yield start
    stop(started, 0.0)


def test_without_attempts_nobody_is_told_and_nothing_is_waited_for(tmp_path: Path, attempt):
    (tmp_path / "here").mkdir()
    attempt(tmp_path / "elsewhere" / "attempts" / "j.1.0")
    assert termination_notice.notify_and_wait(tmp_path / "here", "it ends", lambda _: pytest.fail("told"))
    assert not (tmp_path / "here" / termination_notice.FILE).exists()


def test_the_notice_is_there_until_the_attempts_end(tmp_path: Path, attempt):
    node, told = tmp_path / "node", threading.Event()
    node.mkdir()
    running = attempt(node / "attempts" / "j.1.0")

    def end() -> None:
        assert told.wait(LIMIT_S)
        stop([running], 0.0)

    ending = threading.Thread(target=end)
    ending.start()
    assert termination_notice.notify_and_wait(node, "the machine is taken away", lambda _: told.set())
    ending.join()
    said = json.loads((node / termination_notice.FILE).read_text())
    assert said == {"reason": "the machine is taken away", "grace_s": termination_notice.GRACE_S}
    termination_notice.clear_notice(node)
    assert not (node / termination_notice.FILE).exists()


def test_attempts_that_do_not_end_are_waited_for_no_longer_than_said(tmp_path: Path, attempt):
    (tmp_path / "node").mkdir()
    attempt(tmp_path / "node" / "attempts" / "j.1.0")
    left: list[float] = []
    assert not termination_notice.notify_and_wait(tmp_path / "node", "it ends", left.append, grace_s=0.3)
    assert left == [0.3]


def test_a_pods_hook_is_the_module_itself_and_ends_when_the_attempts_do(tmp_path: Path, attempt):
    node = tmp_path / "node"
    node.mkdir()
    running = attempt(node / "fleets" / "f" / "attempts" / "j.1.0")
    command = [sys.executable, "-m", "cluster.host.termination_notice"]
    hook = subprocess.Popen(command, cwd=ROOT, env={"POLYFLEET_NODE_DIR": str(node)})
    while not (node / termination_notice.FILE).exists():
        assert hook.poll() is None
    stop([running], 0.0)
    assert hook.wait(LIMIT_S) == 0
