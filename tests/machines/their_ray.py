"""A Ray cluster on the bed that somebody else has started by plain `ray start`; and Polyfleet as its user calls it."""

import json
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bed import ROOT, Bed
from bed_machine import HOME, Machine
from patience import wait_for

PORT = 6379
TOKEN = HOME / "their-token"
STARTED = "Ray runtime started"
PATIENCE_S = 240.0
WARM = Path(__file__).with_name("warm_cli.py")
LOOKS = ("inventory", "show", "logs", "doctor", "jobs", "explain", "status", "submit")
"""Verbs that start nothing which outlives them."""
LEAN = ["--object-store-memory=100000000", "--disable-usage-stats", "--include-log-monitor=false"]


last_look: list[str] = []
"""The last command of a user that looked, and what it printed: for whoever reads why a wait was in vain."""


def wait(truth: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    """With what a user saw last. A look costs the server something too, and other tests run beside."""
    return wait_for(truth, lambda: last_look, timeout_s, longest_pause_s=0.7)


class TheirRay:
    """Its head is on `head`. Nodes have Polyfleet on their path unless `env` says otherwise."""

    def __init__(self, bed: Bed, head: Machine, *words: str):
        self.bed, self.address = bed, f"{head.address}:{PORT}"
        self._begun: list[subprocess.Popen[str]] = []
        self._wait_for(self.begin(head, "--head", f"--port={PORT}", "--include-dashboard=false", *words))

    def begin(
        self, machine: Machine, *words: str, python: Path | str = sys.executable, env: Mapping[str, str] | None = None
    ) -> tuple["subprocess.Popen[str]", Path]:
        """A node on `machine`, not waited for, and what it prints."""
        log = self.bed.folder / f"ray-{len(self._begun)}.log"
        give_token(machine)
        given = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(TOKEN), "RAY_memory_monitor_refresh_ms": "0"}
        given |= {"PYTHONPATH": str(ROOT)} if env is None else dict(env)
        where = [] if "--head" in words else [f"--address={self.address}"]
        argv = [str(python), "-m", "ray.scripts.scripts", "start", "--block", *LEAN, *where, *words]
        with log.open("w") as output:
            self._begun.append(machine.popen(argv, given, stdout=output, stderr=subprocess.STDOUT))
        return self._begun[-1], log

    def node(self, machine: Machine, *words: str, **more: Any) -> "subprocess.Popen[str]":
        """One more node, once it is there: its `ray start`, which ends with it."""
        return self._wait_for(self.begin(machine, *words, **more))

    def _wait_for(self, begun: tuple["subprocess.Popen[str]", Path]) -> "subprocess.Popen[str]":
        process, log = begun
        wait(lambda: STARTED in log.read_text() or process.poll() is not None)
        assert STARTED in log.read_text(), log.read_text()
        return process

    def close(self) -> None:
        """Every machine of the bed is started anew."""
        for machine in self.bed.machines.values():
            machine.power_off()
            machine.boot()
        for process in self._begun:
            process.communicate()


def bare_python(folder: Path, but: tuple[str, ...]) -> Path:
    """A Python that has what this one has, but for Polyfleet and those packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    links = folder / "links"
    links.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("__editable__", "polyfleet", "_polyfleet", *but)):
            (links / entry.name).symlink_to(entry)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "links.pth").write_text(f"{links}\n")
    return folder / "bin" / "python"


def give_token(machine: Machine) -> None:
    machine.run(["sh", "-c", f"umask 077; printf 0123456789abcdef0123456789abcdef >{TOKEN}"])


class WarmCLI:
    """Commands of one boot of a machine and one environment; see warm_cli.py."""

    def __init__(self, machine: Machine, env: Mapping[str, str]):
        self.boot, self.env = machine.init, dict(env)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = machine.beside([sys.executable, "-P", str(WARM)], env, **pipes)

    def __call__(self, *words: str) -> "subprocess.CompletedProcess[str] | None":
        """None where it has ended, as with its machine."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(f"{json.dumps(words)}\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            return None
        told = json.loads(line)
        return subprocess.CompletedProcess(["polyfleet", *words], told["code"], told["out"], told["err"])


class User:
    """Of Polyfleet, on one machine."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self._warm: WarmCLI | None = None
        give_token(machine)
        self.env = {"PYTHONPATH": str(ROOT), "RAY_AUTH_TOKEN_PATH": str(TOKEN), "NO_COLOR": "1"}

    def __call__(self, *words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        ran = self._look(*words) if words[0] in LOOKS else None
        if ran is None:
            command = [sys.executable, "-P", "-m", "orchestrator.cli", *words]
            return self.machine.run(command, self.env, check=check)
        last_look[:] = [f"polyfleet {' '.join(words)}: {ran.stdout[-8000:]} {ran.stderr[-2000:]}"]
        assert not check or ran.returncode == 0, f"{self.machine.name}: {ran}"
        return ran

    def _look(self, *words: str) -> "subprocess.CompletedProcess[str] | None":
        if self._warm is None or (self._warm.boot, self._warm.env) != (self.machine.init, self.env):
            self._warm = WarmCLI(self.machine, self.env)
        return self._warm(*words)

    def told(self, verb: str, *words: str) -> Any:
        return json.loads(self(verb, "-o", "json", *words).stdout)

    def doctor(self) -> Any:
        """Findings; its exit code says whether there are any."""
        return json.loads(self("doctor", "-o", "json", check=False).stdout)

    def states(self) -> dict[str, str]:
        """Of the nodes, by name."""
        return {node["node"]: node["state"] for node in self.told("inventory")}

    def reasons(self) -> dict[str, str]:
        """Why each node is in its state, by name."""
        return {node["node"]: node["reason"] for node in self.told("inventory")}

    def submit(self, command: str, *words: str) -> str:
        """Its id."""
        return str(self.told("submit", *words, "--", "sh", "-c", command)["id"])

    def job(self, job: str) -> dict[str, Any]:
        view: dict[str, Any] = self.told("show", job)
        return view

    def ended(self, job: str) -> dict[str, Any]:
        """Its view, once it has."""
        view: dict[str, Any] = wait(lambda: (now := self.job(job))["ended_at"] and now)
        return view

    def ran(self, command: str, *words: str) -> str:
        """What a job printed that has succeeded."""
        view = self.ended(self.submit(command, *words))
        assert view["state"] == "SUCCEEDED", view
        return self("logs", view["id"]).stdout.strip()

    def file(self, path: str) -> Any:
        """JSON in this user's home of Polyfleet."""
        return json.loads((self.machine.disk / ".polyfleet" / path).read_text())

    def processes(self) -> dict[str, int]:
        """Of the fleet's record, by role."""
        return {p["role"]: p["pid"] for p in self.file("fleet.json")["processes"]}
