"""Warnings raised during garbage collection: they fail the run and name the file of tests, and fail no other test.

A file or a socket that nobody closed warns when it is collected, which may be in any later test. So the garbage of each
file of tests is collected after its last test. In between the collector runs rarely: looking through what the tests
hold takes a fifth of the time of files with many small tests. More garbage is there at once for that, so what is freed
after a file is given back to the system: a process had 1.3 GB at the end of some files with it, and 1.0 GB now.

Objects of modules are frozen: no collection looks at them. Many modules are imported only by the first test that needs
them, such as torch with its 200,000 objects. Looking through those after every file, and whenever a benchmark collects,
took a sixth of the CPU time of files that use torch. So everything is frozen again after a file that imported modules.
"""

import ctypes
import gc
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import suppress

import pytest

NEW_OBJECTS = 20_000
"""So many more objects made than freed until the collector looks at the new ones; Python's default is 700."""
MANY_MODULES = 300
"""A test that imports so many is worth a collection of its own, before the next test of its file."""


class Garbage:
    """In the process that runs the tests."""

    def __init__(self) -> None:
        self._frozen_modules = 0
        gc.disable()  # until the tests are collected: nearly all that is made until then stays

    def pytest_collection_finish(self) -> None:
        gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
        gc.enable()
        gc.collect()
        self._freeze()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        try:
            return (yield)
        finally:
            new_modules = len(sys.modules) - self._frozen_modules
            if nextitem is None or nextitem.path != item.path or new_modules >= MANY_MODULES:
                collect()
                if new_modules > 0:
                    self._freeze()
                with suppress(AttributeError, OSError):  # only glibc has it
                    ctypes.CDLL(None).malloc_trim(0)

    def _freeze(self) -> None:
        gc.freeze()
        self._frozen_modules = len(sys.modules)


def collect() -> None:
    """Exceptions that Python ignores meanwhile become warnings of the test that has just run, under its filters."""
    ignored: list[str] = []
    before, sys.unraisablehook = sys.unraisablehook, lambda told: ignored.append(text_of(told))
    try:
        gc.collect()
    finally:
        sys.unraisablehook = before
    for text in ignored:
        warnings.warn(pytest.PytestUnraisableExceptionWarning(text), stacklevel=1)


def text_of(told: "sys.UnraisableHookArgs") -> str:
    """As pytest says it."""
    lines = traceback.format_exception(told.exc_type, told.exc_value, told.exc_traceback)
    return f"{told.err_msg or 'Exception ignored in'}: {told.object!r}\n\n{''.join(lines)}"


class Uncollected:
    """In the process that reports."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._warned: list[tuple[str, str]] = []

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, nodeid: str) -> None:
        if issubclass(warning_message.category, pytest.PytestUnraisableExceptionWarning):
            self._warned.append((nodeid.partition("::")[0], str(warning_message.message)))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """After flaky tests were repeated: that may make a failed run a good one."""
        if self._warned and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._warned:
            terminalreporter.section("warnings raised during garbage collection: this run fails")
            for file, message in self._warned:
                terminalreporter.write_line(f"{file}, or a file that ran before it in the same process: {message}")
