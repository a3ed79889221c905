"""The real command, as a process of its own."""

import os
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "orchestrator.cli"]


@pytest.fixture
def command():
    return COMMAND


@pytest.fixture
def polyfleet(tmp_path):
    """Run it to its end in `tmp_path`. Its home is POLYFLEET_HOME, as `live` sets it."""

    def run(*words, env=None, **options):
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("COLUMNS", "NO_COLOR", "FORCE_COLOR"))}
        options = {"cwd": tmp_path, "capture_output": True} | options
        done = subprocess.run([*COMMAND, *words], env=variables | (env or {}), **options)
        if done.stdout is not None:
            done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
        return done

    return run


@pytest.fixture
def home_of(tmp_path, polyfleet, monkeypatch):
    """`home_of(name)` makes a home and lets the commands that follow use it; their servers are stopped at the end."""
    monkeypatch.delenv("POLYFLEET_DATABASE_URL", raising=False)
    homes = []

    def use(name="home"):
        homes.append(tmp_path / name)
        monkeypatch.setenv("POLYFLEET_HOME", str(homes[-1]))
        return homes[-1]

    yield use
    for home in homes:
        polyfleet("server", "stop", env={"POLYFLEET_HOME": str(home)})


@pytest.fixture
def home(home_of):
    return home_of()
