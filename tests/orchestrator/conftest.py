"""A real server in a thread with the real service, on nodes that were recorded, in a home of its own."""

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import uvicorn
from patience import LIMIT_S, wait_for
from response_checks import ResponseChecks

from cluster.host import tokens
from cluster.host.processes import identify
from cluster.version import VERSION
from orchestrator.cli.main import main
from orchestrator.client import client as http
from orchestrator.home import server_record, unix_socket
from orchestrator.home.server_record import ServerRecord
from orchestrator.server.app import make_app
from orchestrator.server.http.hub import Hub
from orchestrator.server.serve import listener, server_config
from orchestrator.services.service import Service

COMMAND = [sys.executable, "-m", "orchestrator.cli"]
CHECKPOINTS = Path(__file__).parents[1] / "data" / "checkpoint-v1"
RECORDED = Path(__file__).with_name("recorded_fleet.py")


@pytest.fixture(scope="session")
def recorded() -> ModuleType:
    """The module recorded_fleet."""
    spec = importlib.util.spec_from_file_location("recorded_fleet", RECORDED)
    module = sys.modules["recorded_fleet"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Live:
    """A server that answers: `http` has the token. `fleet` is what is recorded of its nodes."""

    home: Path
    port: int
    socket: Path
    token: str
    service: Service
    fleet: Any
    app: Any
    stopped: threading.Event

    @property
    def specs(self) -> list[dict]:
        """Of all jobs that were submitted, as they were sent."""
        return [e.data["spec"] for e in self.service.store.read(0) if e.event == "submitted"]

    def ran(self, spec: dict, state: str = "SUCCEEDED") -> dict:
        """The job once it has ended, in that state."""
        with http.connect(self.home, start=False) as client:
            view = client.wait(client.jobs.submit(spec)["id"], timeout_s=LIMIT_S)
        assert view["state"] == state, view
        return view

    def store_checkpoint(self) -> str:
        """A reference to a checkpoint in the storage of pool cpu."""
        shutil.copytree(CHECKPOINTS, self.home / "storage" / "cpu" / "digits")
        return "cpu:digits"

    @property
    def hub(self) -> Hub:
        """First argument of a verb."""
        return self.app.state.hub

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
        return httpx.Client(base_url=self.url, headers=headers, trust_env=False, timeout=None)


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
    with listener(0) as listening, unix_socket.listener(folder) as (unix, stage.socket):
        stage.port = listening.getsockname()[1]
        server = uvicorn.Server(server_config(stage))
        server.config.lifespan = "off"
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening, unix]})
        thread.start()
        wait_for(lambda: server.started)
        yield stage
        server.should_exit = True
        thread.join(LIMIT_S)


@contextmanager
def serving(home: Path, recorded: ModuleType, patch: pytest.MonkeyPatch, stage: Stage) -> Iterator[Live]:
    """`home` has a server until this ends; what `patch` sets stays until it is undone."""
    home.mkdir(mode=0o700)
    patch.setenv("POLYFLEET_HOME", str(home))
    token = tokens.read(tokens.create_token(home / "token"))
    fleet, stopped = recorded.RecordedFleet(home, patch), threading.Event()
    fleet.up()
    service = Service(home)
    app = make_app(service, token, home=home, stop=stopped.set)
    checks = stage.app = ResponseChecks(app)
    own = identify(os.getpid())
    where = (stage.port, VERSION, "2026-11-20T23:14:53Z", str(stage.socket))
    server_record.write(home, ServerRecord(own.pid, own.created, *where))
    fleet.wait_until_known(service)
    yield Live(home, stage.port, stage.socket, token, service, fleet, app, stopped)
    app.state.stopping.set()
    service.close()
    fleet.close(service)
    assert not checks.problems, "\n".join(checks.problems)


@pytest.fixture
def live(tmp_path, recorded, monkeypatch, stage):
    with serving(tmp_path / "home", recorded, monkeypatch, stage) as live:
        yield live


@pytest.fixture(scope="module")
def shared_live(tmp_path_factory, recorded, stage):
    """One for all tests of a file that only read. None of them may use `live` too: there is one stage."""
    home = tmp_path_factory.mktemp("shared") / "home"
    with pytest.MonkeyPatch.context() as patch, serving(home, recorded, patch, stage) as live:
        yield live


@pytest.fixture
def talking(tmp_path):
    """A job that prints what is written into `talking.pipe`, and succeeds when that is closed."""
    with Talking(tmp_path / "pipe") as talking:
        yield talking


class Talking:
    def __init__(self, path: Path):
        os.mkfifo(path)
        self.spec = {"task": "run", "name": "talks", "command": ["cat", str(path)]}
        self.file = os.open(path, os.O_RDWR)  # a reader too: opening waits for nobody

    def __enter__(self) -> "Talking":
        return self

    def __exit__(self, *raised: object) -> None:
        self.end()

    def say(self, text: str) -> None:
        os.write(self.file, text.encode())

    def end(self) -> None:
        """The job has read all, and ends."""
        if self.file is not None:
            os.close(self.file)
        self.file = None


@pytest.fixture
def checkpoint(live):
    """A reference to a checkpoint in the storage of pool cpu."""
    return live.store_checkpoint()


@pytest.fixture
def measuring(live, recorded):
    """Benchmark runs that begin find their lines measured: over two pools, of which xla takes twice as long."""
    with recorded.measuring(live.service):
        yield


@pytest.fixture(name="wait_for")
def wait_for_fixture():
    return wait_for


@pytest.fixture
def start():
    """Start the command and leave it to the test, which ends it or has it ended."""
    running = []

    def run(*words, **options):
        child = subprocess.Popen([*COMMAND, *words], **options)
        running.append(child)
        return child

    yield run
    for child in running:
        with child:  # closes its pipes
            child.kill()


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def here(monkeypatch, capsys):
    """The same command in this process: a tenth of the time, for the many combinations of verb and format.

    Lines of progress are left out: a terminal shows them only while something takes long.
    """

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["polyfleet", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        stdout, stderr = capsys.readouterr()
        return Done(ended.value.code or 0, stdout, without_progress(stderr))

    return run


def without_progress(stderr: str) -> str:
    return "".join(line for line in stderr.splitlines(keepends=True) if not line.endswith(" …\n"))
