"""Failed tests that use real processes are run once more; those that pass then are reported as flaky.

A failed test that started a process, or whose fixtures did, runs once more, alone, in a new process. If it passes
there, `FLAKY name` is printed. A run with at most MAX_FLAKY of them passes; each is a fault to fix all the same. A test
without a process is never repeated.
"""

import multiprocessing.process
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MAX_FLAKY = 2
MAX_REPEATED = 6
"""If more tests than that failed, none is repeated."""
SWITCH = "POLYFLEET_TESTS_RETRY"
"""`no` in the environment: nothing is repeated."""
LIMIT_S = 1800.0


class Starts:
    """In the process that runs the tests: which of them started a process, by themselves or by a fixture."""

    def __init__(self) -> None:
        self.count = 0
        self._fixtures: set[str] = set()
        self._before = 0
        os.register_at_fork(before=self._one_more)
        for owner, name in ((subprocess.Popen, "__init__"), (multiprocessing.process.BaseProcess, "start")):
            setattr(owner, name, self._counted(getattr(owner, name)))

    def _one_more(self) -> None:
        self.count += 1

    def _counted(self, start: Any) -> Any:
        def wrapped(*arguments: Any, **more: Any) -> Any:
            self.count += 1
            return start(*arguments, **more)

        return wrapped

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        before = self.count
        try:
            return (yield)
        finally:
            if self.count > before:
                self._fixtures.add(fixturedef.argname)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._before = self.count
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report: pytest.TestReport = yield
        names = getattr(item, "fixturenames", ())
        if report.failed and (self.count > self._before or not self._fixtures.isdisjoint(names)):
            report.user_properties.append(("processes", True))
        return report


class Retries:
    """In the process that reports: repeats what failed, and says how it ended."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._failed: dict[str, bool] = {}
        self.flaky: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with_processes = ("processes", True) in report.user_properties
            self._failed[report.nodeid] = self._failed.get(report.nodeid, True) and with_processes

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or not 0 < len(self._failed) <= MAX_REPEATED:
            return
        self.flaky = [name for name, repeated in self._failed.items() if repeated and self._passes(name)]
        if len(self.flaky) == len(self._failed) <= MAX_FLAKY:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name in self.flaky:
            terminalreporter.write_line(f"FLAKY {name}: failed, then passed when run again alone", yellow=True)

    def _passes(self, nodeid: str) -> bool:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--tier=any", nodeid]
        environment = {name: value for name, value in os.environ.items() if name != "POLYFLEET_TESTS_FAILURES"}
        environment |= {SWITCH: "no"}
        try:
            done = subprocess.run(
                words, cwd=self._config.rootpath, env=environment, capture_output=True, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return False
        if terminal is not None:
            outcome = "passed" if done.returncode == 0 else "failed"
            terminal.write_line(f"\n{outcome} when run again alone: {nodeid}")
            if done.returncode:
                terminal.write_line(done.stdout[-6000:])
        self._keep(nodeid, done.returncode)
        return done.returncode == 0

    def _keep(self, nodeid: str, code: int) -> None:
        """The file of failures says which were flaky."""
        if (file := os.environ.get("POLYFLEET_TESTS_FAILURES")) and code == 0:
            with Path(file).open("a") as f:
                f.write(f"FLAKY {nodeid}\n")
