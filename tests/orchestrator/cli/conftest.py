"""The real command, as a process of its own."""

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from orchestrator.cli.main import main

COMMAND = [sys.executable, "-m", "orchestrator.cli.main"]


@pytest.fixture
def command():
    return COMMAND


@pytest.fixture
def polyfleet(tmp_path):
    """Run it to its end in `tmp_path`. Its home is POLYFLEET_HOME, as `live` sets it."""

    def run(*words, env=None, timeout_s=60, **options):
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("COLUMNS", "NO_COLOR", "FORCE_COLOR"))}
        options = {"cwd": tmp_path, "capture_output": True, "timeout": timeout_s} | options
        done = subprocess.run([*COMMAND, *words], env=variables | (env or {}), **options)
        if done.stdout is not None:
            done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
        return done

    return run


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def here(monkeypatch, capsys):
    """The same command in this process: a tenth of the time, for the many combinations of verb and format."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["polyfleet", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(ended.value.code or 0, *capsys.readouterr())

    return run
