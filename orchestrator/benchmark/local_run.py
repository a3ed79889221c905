"""Columns of this machine, without a fleet: each a child process that opens one back end's device."""

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
from orchestrator.benchmark.round_runner import RoundRunner, SessionEnded, TargetLost
from workers.benchmark.session_server import request

UP_S = 180.0
CODE = str(Path(__file__).parents[2])
Data = dict[str, Any]


class LocalTarget:
    """One device of `backend`; for use in a `with`. A session that ends amid a call is started anew."""

    def __init__(self, backend: str, number: int = 0, seed: int = 0, python: str = sys.executable):
        self.backend, self.number = backend, number
        self._seed, self._python = seed, python
        self._child: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="pf-here-")
        self._complaints = Path(self._folder.name) / "stderr"
        self.id, self.host = backend, ""
        self.facts: Data = {}

    def __enter__(self) -> "LocalTarget":
        """Raises UserError where the back end cannot be used here."""
        try:
            described = self._start()
        except TargetLost as e:
            self._folder.cleanup()
            raise UserError(f"back end {self.backend!r} does not come up: {e}", "`polyfleet doctor` may know") from None
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
            told: Data = request(Path(self._folder.name), message, timeout_s)
        except UserError as e:
            return {"failed": e.message}
        except FleetError as e:
            why = self._ended() or e.message
            self._start()
            raise SessionEnded(why) from e
        return told

    def _start(self) -> Data:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        address = Path(self._folder.name) / "session.json"
        address.unlink(missing_ok=True)
        path = os.pathsep.join(filter(None, (CODE, os.environ.get("PYTHONPATH", ""))))
        command = [self._python, "-m", "workers.benchmark", self._folder.name, self.backend]
        with self._complaints.open("w") as complaints:
            self._child = subprocess.Popen(
                [*command, str(self.number), str(self._seed)],
                env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.DEVNULL, stderr=complaints,
            )  # fmt: skip
        deadline = time.monotonic() + UP_S
        while not address.exists():
            if self._child.poll() is not None or time.monotonic() > deadline:
                raise TargetLost(self._ended() or f"it did not start within {UP_S:.0f} s")
            time.sleep(0.05)
        told: Data = request(Path(self._folder.name), {"do": "describe"}, UP_S)
        return told

    def _ended(self) -> str:
        """Why the child is gone: its last words, or its exit code; "" while it lives."""
        assert self._child is not None
        try:
            code = self._child.wait(5)
        except subprocess.TimeoutExpired:
            return ""
        said = self._complaints.read_text(errors="replace").strip().splitlines()
        known = {124: "the case took too long", -9: "killed, out of memory perhaps", -11: "a segmentation fault"}
        return known.get(code) or (said[-1] if said else f"exit code {code}")


def measure(request: Data, backends: list[str], progress: Callable[[str], None]) -> list[Data]:
    """The lines of a run over back ends of this machine. Raises SpecError, NotFound, UserError."""
    asked = suite.request(request)
    named = [_named(word) for word in backends]
    if len(set(named)) < len(named):
        told = ", ".join(backends)
        raise UserError(f"{told} names a device twice", "name it once: every run holds a device against itself")
    if asked.entry:
        raise UserError("a model of yours is measured in a fleet's environments", "leave out --here")
    begun_s = time.time()
    lines: list[Data] = []

    def tell(line: Data) -> None:
        if line["line"] == "progress":
            progress(f"{line['case']} ({line['number']} of {line['of']})")
        else:
            lines.append(line | {"time": time.time()})

    with ExitStack() as opened:
        columns = [opened.enter_context(LocalTarget(*name, seed=asked.seed)) for name in named]
        described = [
            {"column": c.id, "kind": c.facts["kind"], "pool": "", "job": "", "number": c.number} for c in columns
        ]
        lines.append({"line": "begun", "run": f"here-{int(begun_s)}", "request": asked.to_plain(), "columns": described,
                      "time": begun_s})  # fmt: skip
        lines += [{"line": "column", "column": c.id, "host": c.host, "facts": c.facts} for c in columns]
        RoundRunner(asked, columns, tell).run(suite.groups(asked))
    return [*lines, {"line": "ended", "state": "SUCCEEDED", "reason": "", "time": time.time()}]


def _named(word: str) -> tuple[str, int]:
    """`nvidia`, or `nvidia.1` for another device than the first."""
    name, _, number = word.partition(".")
    if number and not number.isdigit():
        raise UserError(f"{word!r} names no back end", "write nvidia, or nvidia.1 for its second device")
    return name, int(number or 0)
