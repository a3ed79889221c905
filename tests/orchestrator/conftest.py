"""A real server in a thread, with a service that records, in a home of its own."""

import importlib.util
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import uvicorn

from cluster import tokens
from cluster.processes import identify
from cluster.version import VERSION
from orchestrator.server import record, sockets
from orchestrator.server.app import make_app
from orchestrator.server.record import ServerRecord
from orchestrator.server.serve import listener, server_config

RECORDING = Path(__file__).with_name("recording_service.py")


@pytest.fixture(scope="session")
def recording() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recording_service", RECORDING)
    module = sys.modules["recording_service"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Live:
    """A server that answers: `http` has the token, `bare` has not."""

    home: Path
    port: int
    socket: Path
    token: str
    service: Any
    app: Any
    stopped: threading.Event

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def http(self) -> httpx.Client:
        return self.client({"Authorization": f"Bearer {self.token}"})

    def client(self, headers: dict) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=headers, trust_env=False, timeout=20)


class Stage:
    """What the one server of the session serves now: each test brings an application of its own."""

    app: Any = None
    port = 0
    socket = Path()

    async def __call__(self, scope, receive, send):
        await self.app(scope, receive, send)


@pytest.fixture(scope="session")
def stage(tmp_path_factory):
    stage = Stage()
    folder = tmp_path_factory.mktemp("stage")
    with listener(0) as listening, sockets.listener(folder) as (unix, stage.socket):
        stage.port = listening.getsockname()[1]
        server = uvicorn.Server(server_config(stage))
        server.config.lifespan = "off"
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening, unix]})
        thread.start()
        wait_for(lambda: server.started)
        yield stage
        server.should_exit = True
        thread.join(20)


@pytest.fixture
def live(tmp_path, recording, monkeypatch, stage):
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("POLYFLEET_HOME", str(home))
    token = tokens.read(tokens.ensure(home / "token"))
    service, stopped = recording.RecordingService(), threading.Event()
    stage.app = make_app(service, token, home=home, stop=stopped.set)
    own = identify(os.getpid())
    where = (stage.port, VERSION, "2026-11-20T23:14:53Z", str(stage.socket))
    record.write(home, ServerRecord(own.pid, own.created, *where))
    yield Live(home, stage.port, stage.socket, token, service, stage.app, stopped)
    stage.app.state.stopping.set()
    service.release.set()


def wait_for(condition, deadline_s=20.0):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "not within the deadline"
        time.sleep(0.01)


@pytest.fixture(name="wait_for")
def wait_for_fixture():
    return wait_for
