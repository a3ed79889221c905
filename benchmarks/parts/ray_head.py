"""A plain Ray head with its dashboard, for `ray job submit`: its own ports, folder and token, stopped by process id."""

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

from cluster.host.processes import ProcessId, free_port, is_alive, start_detached, stop
from cluster.nodes.ray_node import inherited_environment, token_environment

PATIENCE_S = 90.0
STARTED = b"Ray runtime started"


@dataclass(frozen=True)
class RayHead:
    """`env` is what a client of it needs, `folder` holds its log and whatever it writes."""

    interpreter: Path
    url: str
    address: str
    env: dict[str, str]
    folder: Path
    process: ProcessId

    def command(self, *words: str) -> list[str]:
        """Ray's own command line, from the same environment."""
        return [str(self.interpreter), "-m", "ray.scripts.scripts", *words]


def start(interpreter: Path, cpus: int) -> RayHead:
    """Returns when the job API answers. Raises SystemExit with the log's end when it does not come up."""
    folder = Path(tempfile.mkdtemp(prefix="rh-", dir="/tmp"))  # Unix socket paths end at 107 bytes
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    ports = (free_port(), free_port())
    env = inherited_environment() | token_environment(token) | _settings()
    process = start_detached(_head(interpreter, folder, ports, cpus), env=env, cwd=folder, log=folder / "log")
    urls = (f"http://127.0.0.1:{ports[1]}", f"127.0.0.1:{ports[0]}")
    head = RayHead(interpreter, *urls, env, folder, process)
    try:
        _await(head.process, folder / "log", lambda: _answers(ports[1], token.read_text()))
    except BaseException:
        end(head)
        raise
    return head


def join(head: RayHead) -> ProcessId:
    """Start one more node of that cluster, without CPUs, and wait until it is started. Its process is the caller's."""
    log = head.folder / "log-join"
    process = start_detached(_node(head), env=head.env | _settings(), cwd=head.folder, log=log)
    try:
        _await(process, log, lambda: STARTED in log.read_bytes())
    except BaseException:
        stop([process])
        raise
    return process


def end(head: RayHead) -> None:
    stop([head.process])
    shutil.rmtree(head.folder, ignore_errors=True)


@contextmanager
def ended(head: RayHead | None) -> Iterator[None]:
    """Whatever happens inside, it does not stay."""
    try:
        yield
    finally:
        if head is not None:
            end(head)


def _settings() -> dict[str, str]:
    ports = {name: str(free_port()) for name in ("AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT")}
    return ports | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }


def _head(interpreter: Path, folder: Path, ports: tuple[int, int], cpus: int) -> list[str]:
    return [
        *_start(interpreter), "--head", f"--port={ports[0]}", f"--temp-dir={folder}", f"--num-cpus={cpus}",
        f"--ray-client-server-port={free_port()}", "--include-dashboard=true", "--dashboard-host=127.0.0.1",
        f"--dashboard-port={ports[1]}",
    ]  # fmt: skip


def _node(head: RayHead) -> list[str]:
    return [*_start(head.interpreter), f"--address={head.address}", "--num-cpus=0"]


def _start(interpreter: Path) -> list[str]:
    return [
        str(interpreter), "-m", "ray.scripts.scripts", "start", "--block", "--num-gpus=0",
        f"--object-store-memory={128 << 20}", "--dashboard-agent-listen-port=0",
    ]  # fmt: skip


def _await(process: ProcessId, log: Path, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not ready():
        if not is_alive(process) or time.monotonic() > deadline:
            said = log.read_text(errors="replace").strip().splitlines()[-5:]
            raise SystemExit("Ray did not start:\n" + "\n".join(said))
        time.sleep(0.02)


def _answers(port: int, token: str) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/api/jobs/", headers={"Authorization": f"Bearer {token}"})
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
