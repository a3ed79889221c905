"""Benchmark targets on this machine, without a fleet: each is a child process that opens one backend's device."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cluster.errors import FleetError, UserError
from orchestrator.benchmark import suite
from orchestrator.benchmark.results import LINE_FORMAT
from orchestrator.benchmark.round_runner import RoundRunner, SessionEnded, TargetLost
from workers.benchmark.session_server import request

START_TIMEOUT_S = 180.0
CODE = str(Path(__file__).parents[2])
Data = dict[str, Any]


class LocalTarget:
    """One device of `backend`, as a context manager. A session that ends during a call is restarted."""

    def __init__(self, backend: str, number: int = 0, seed: int = 0, python: str = sys.executable):
        self.backend, self.number = backend, number
        self._seed, self._python = seed, python
        self._child: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="pf-here-")
        self._stderr_path = Path(self._folder.name) / "stderr"
        self.id, self.host = backend, ""
        self.facts: Data = {}

    def __enter__(self) -> "LocalTarget":
        """Start the session. Raises UserError if the backend cannot be used here."""
        try:
            described = self._start()
        except TargetLost as e:
            self._folder.cleanup()
            raise UserError(
                f"backend {self.backend!r} does not start: {e}", "run `polyfleet doctor` to look for the cause"
            ) from None
        self.host = described["host"]
        device = described["device"]
        self.id = device["kind"] + (f".{self.number}" if self.number else "")
        self.facts = described | {"kind": device["kind"], "pool": "", "node": os.uname().nodename}
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self._folder.cleanup()

    def call(self, message: Data, timeout_s: float) -> Data:
        try:
            reply: Data = request(Path(self._folder.name), message, timeout_s)
        except UserError as e:
            return {"failed": e.message}
        except FleetError as e:
            reason = self._ended() or e.message
            self._start()
            raise SessionEnded(reason) from e
        return reply

    def _start(self) -> Data:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        address = Path(self._folder.name) / "session.json"
        address.unlink(missing_ok=True)
        path = os.pathsep.join(filter(None, (CODE, os.environ.get("PYTHONPATH", ""))))
        command = [self._python, "-m", "workers.benchmark", self._folder.name, self.backend]
        with self._stderr_path.open("w") as complaints:
            self._child = subprocess.Popen(
                [*command, str(self.number), str(self._seed)],
                env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.DEVNULL, stderr=complaints,
            )  # fmt: skip
        deadline = time.monotonic() + START_TIMEOUT_S
        while not address.exists():
            if self._child.poll() is not None or time.monotonic() > deadline:
                raise TargetLost(self._ended() or f"it did not start within {START_TIMEOUT_S:.0f} s")
            time.sleep(0.05)
        description: Data = request(Path(self._folder.name), {"do": "describe"}, START_TIMEOUT_S)
        return description

    def _ended(self) -> str:
        """Return why the child ended: its last line on stderr or its exit code; "" while it runs."""
        assert self._child is not None
        try:
            code = self._child.wait(5)
        except subprocess.TimeoutExpired:
            return ""
        errors = self._stderr_path.read_text(errors="replace").strip().splitlines()
        causes = {124: "the case took too long", -9: "killed, possibly out of memory", -11: "a segmentation fault"}
        return causes.get(code) or (errors[-1] if errors else f"exit code {code}")


def measure(request: Data, backends: list[str], progress: Callable[[str], None]) -> list[Data]:
    """Run a benchmark on backends of this machine and return its lines. Raises SpecError, NotFound, UserError."""
    benchmark = suite.request(request)
    devices = [_parse_target(backend) for backend in backends]
    if len(set(devices)) < len(devices):
        names = ", ".join(backends)
        raise UserError(f"{names} names a device twice", "name it once: every run compares a device with itself")
    if benchmark.entry:
        raise UserError("your own model is measured in a fleet's environments only", "omit --local")
    started_s = time.time()
    lines: list[Data] = []

    def on_line(line: Data) -> None:
        if line["line"] == "progress":
            progress(f"{line['case']} ({line['number']} of {line['of']})")
        else:
            lines.append(line | {"time": time.time()})

    with ExitStack() as stack:
        targets = [stack.enter_context(LocalTarget(*name, seed=benchmark.seed)) for name in devices]
        descriptions = [
            {"target": c.id, "kind": c.facts["kind"], "pool": "", "job": "", "number": c.number} for c in targets
        ]
        lines.append(
            {
                "line": "started",
                "format": LINE_FORMAT,
                "run": f"here-{int(started_s)}",
                "request": benchmark.to_plain(),
                "targets": descriptions,
                "time": started_s,
            }
        )
        lines += [{"line": "target", "target": c.id, "host": c.host, "facts": c.facts} for c in targets]
        RoundRunner(benchmark, targets, on_line).run(suite.groups(benchmark))
    return [*lines, {"line": "ended", "state": "SUCCEEDED", "reason": "", "time": time.time()}]


def _parse_target(text: str) -> tuple[str, int]:
    """Parse `nvidia`, or `nvidia.1` for its second device."""
    name, _, number = text.partition(".")
    if number and not number.isdigit():
        raise UserError(f"{text!r} is not a backend", "write nvidia, or nvidia.1 for its second device")
    return name, int(number or 0)
