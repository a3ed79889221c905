"""What a run of tests says beside pytest: each failure when it happens, so that a run that is stopped before its
summary has named it, and at the end the seconds of each folder.
"""

import os
import signal
from collections import defaultdict
from pathlib import Path

import pytest
import schedule

MAX_CAPTURED_CHARACTERS = 4000


class RunReport:
    """Prints each failure as it happens, and appends its name to the file that POLYFLEET_TESTS_FAILURES names."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._file = os.environ.get("POLYFLEET_TESTS_FAILURES")
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.split("::")[0]] += report.duration
        if report.failed:
            self._print(report.when or "", report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._print("collection", report)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._config.option.write_durations:
            schedule.write_durations(self._seconds)
        if self._config.option.durations is None:
            return
        folders: dict[str, float] = defaultdict(float)
        for file, seconds in self._seconds.items():
            folders["/".join(file.split("/")[:3]) if file.count("/") > 2 else file.rpartition("/")[0]] += seconds
        terminalreporter.section("seconds per folder and per slow file")
        for rows in (folders, {file: s for file, s in self._seconds.items() if s >= 10}):
            for name, seconds in sorted(rows.items(), key=lambda row: -row[1]):
                terminalreporter.write_line(f"{seconds:8.1f} {name}")

    def _print(self, when: str, report: pytest.TestReport | pytest.CollectReport) -> None:
        if self._file:
            with Path(self._file).open("a") as file:
                file.write(f"FAILED {report.nodeid} ({when}): {first_line(report)}\n")
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if terminal is None:
            return
        terminal.ensure_newline()
        terminal.write_sep("_", f"FAILED {report.nodeid} ({when})", red=True)
        terminal.write_line(report.longreprtext)
        for title, text in report.sections:
            terminal.write_sep("-", title)
            terminal.write_line(text[-MAX_CAPTURED_CHARACTERS:])


def first_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Of what was raised."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longreprtext).partition("\n")[0][:300]


def heed_interrupts() -> None:
    """A run in the background of a shell ignores SIGINT; the check's limit of time sends it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
