"""A failed test is reported when it fails, so that a run that is stopped before its summary has named it."""

import os
import signal
from pathlib import Path

import pytest


class Failures:
    """Prints each failure as it happens, and appends its name to the file that POLYFLEET_TESTS_FAILURES names."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._file = os.environ.get("POLYFLEET_TESTS_FAILURES")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._print(report.nodeid, report.when or "", report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._print(report.nodeid, "collection", report)

    def _print(self, name: str, when: str, report: pytest.TestReport | pytest.CollectReport) -> None:
        if self._file:
            with Path(self._file).open("a") as file:
                file.write(f"FAILED {name} ({when})\n")
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if terminal is None:
            return
        terminal.ensure_newline()
        terminal.write_sep("_", f"FAILED {name} ({when})", red=True)
        terminal.write_line(report.longreprtext)
        for title, text in report.sections:
            terminal.write_sep("-", title)
            terminal.write_line(text[-4000:])


def report_failures(config: pytest.Config) -> None:
    """For `pytest_configure`. A run in the background of a shell ignores SIGINT; the check's limit of time sends it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(config), "failures")
