"""A process of tests sends the process that reports one message of most tests, instead of six.

Each message wakes threads of both: with 12,000 tests that was half a minute of CPU time. What a passed test's setup and
teardown would report is their time alone, which is no news if it is short. Failures, skips, output and long phases are
reported as ever.
"""

import pytest
from _pytest.runner import runtestprotocol

BRIEF_S = 0.01
"""A phase that took less is not reported; the times per file and folder are that much too low per test."""


class BriefReports:
    """In the processes of pytest-xdist that run the tests."""

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """As pytest's own, which would report every phase, and that the test begins and ends."""
        for report in runtestprotocol(item, log=False, nextitem=nextitem):
            if is_news(report):
                item.ihook.pytest_runtest_logreport(report=report)
        return True


def is_news(report: pytest.TestReport) -> bool:
    quiet = report.passed and report.when != "call" and not report.sections
    return not quiet or report.duration >= BRIEF_S
