"""A limit of time for every test, and what its processes were doing when it had passed."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import leftovers
import psutil
import pytest
import tiers
from patience import PATIENCE

LIMIT_S = {tiers.GATE: 120.0, tiers.FULL: 600.0, tiers.CHAOS: 1800.0}
"""By the tier of the file; `pytest.mark.timeout(seconds)` says another."""
MAX_PROCESSES, MAX_CHARACTERS, DUMP_S = 20, 3000, 5.0
STACKS = pytest.StashKey[str]()


class Limits:
    """With pytest-timeout. The second environment has none: whoever starts pytest there limits it."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            given = item.get_closest_marker("timeout")
            limit_s = given.args[0] if given else LIMIT_S[tiers.tier_of(item.path)]
            item.add_marker(pytest.mark.timeout(limit_s * PATIENCE), append=False)

    @pytest.hookimpl(wrapper=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item) -> Iterator[None]:
        """Looks at the processes when the limit has passed, before the test hears of it and ends them."""
        result = yield
        if callable(theirs := signal.getsignal(signal.SIGALRM)):

            def passed(number: int, frame: FrameType | None) -> None:
                item.stash[STACKS] = "\n\n".join(stacks())
                theirs(number, frame)

            signal.signal(signal.SIGALRM, passed)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report: pytest.TestReport = yield
        if report.failed and (seen := item.stash.get(STACKS, "")):
            report.sections.append(("processes that it had started when its limit had passed", seen))
        return report


def stacks() -> Iterator[str]:
    """Of what this process of tests has started: a line of each process, and where its threads are."""
    for process in [p for p in _started() if p.is_running()][:MAX_PROCESSES]:
        yield f"{leftovers.describe(process)}\n{_stack(process)}"


def _started() -> Iterator[psutil.Process]:
    """Our descendants, and what has left our family and kept our variables."""
    mine = {name: os.environ.get(name) for name in (leftovers.RUN, "PYTEST_XDIST_WORKER")}
    below = set(psutil.Process().children(recursive=True))
    yield from below
    for process in leftovers.processes_of(
        os.environ.get(leftovers.RUN, "-"), Path(os.environ.get("TMPDIR", "/nowhere"))
    ):
        try:
            environment = process.environ()
        except psutil.Error:
            continue
        if process not in below and all(environment.get(name) == value for name, value in mine.items()):
            yield process


def _stack(process: psutil.Process) -> str:
    """py-spy's, of a Python; else the system call that it waits in."""
    spy = shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if spy and "python" in _exe(process):
        words = [spy, "dump", "--pid", str(process.pid)]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=DUMP_S, check=False)
        except subprocess.TimeoutExpired:
            return f"py-spy did not answer within {DUMP_S:.0f} s"
        if done.returncode == 0:
            return done.stdout[-MAX_CHARACTERS:]
    try:
        return f"{process.status()}, waits in {Path(f'/proc/{process.pid}/wchan').read_text() or 'nothing'}"
    except (psutil.Error, OSError):
        return "ended"


def _exe(process: psutil.Process) -> str:
    try:
        return process.exe()
    except psutil.Error:
        return ""
