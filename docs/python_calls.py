"""Which command, which method of `Orchestrator` and which route do the same: rows of docs/reference/python.md."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import typer.main

from orchestrator.api import Orchestrator
from orchestrator.cli.main import app
from orchestrator.python_api.benchmarks import Benchmarks
from orchestrator.python_api.checkpoints import Checkpoints
from orchestrator.python_api.fleet import Fleet
from orchestrator.python_api.jobs import Jobs
from orchestrator.python_api.nodes import Nodes
from orchestrator.python_api.server import Server
from orchestrator.submission.jobs import JobHandle
from orchestrator.verbs.declare import Verb, all_verbs

NOUNS = {
    "jobs": Jobs,
    "nodes": Nodes,
    "fleet": Fleet,
    "checkpoints": Checkpoints,
    "benchmarks": Benchmarks,
    "server": Server,
}
GROUPS = {"nodes": "node ", "checkpoints": "checkpoint ", "benchmarks": "benchmark ", "server": "server "}
"""Commands of the other nouns have no group."""
METHODS = {
    "Orchestrator.up": Orchestrator.up,
    "o.down": Orchestrator.down,
    "o.schema": Orchestrator.schema,
    "job.files": JobHandle.files,
    "job.get": JobHandle.get,
    "job.put": JobHandle.put,
    "job.reports": JobHandle.reports,
}
"""Methods that belong to no noun."""
COMMANDS = {
    "o.jobs.list": "jobs",
    "o.jobs.plan": "submit --dry-run",
    "o.jobs.offers": "offer",
    "o.jobs.follow": "logs --follow",
    "o.jobs.submit_many": "submit",
    "o.nodes.list": "inventory",
    "o.fleet.show": "status",
    "o.benchmarks.list": "benchmark runs",
    "o.server.version": "server status",
    "Orchestrator.up": "up",
    "job.files": "files ls",
    "job.get": "files get",
    "job.put": "files put",
}
"""Commands whose words are not those of their method."""
ACTIONS = {
    "o.jobs.get": "jobs.show",
    "o.fleet.backends": "nodes.list",
    "o.benchmarks.run": "benchmarks.start",
    "o.benchmarks.report": "benchmarks.lines",
    "o.schema": "schema.show",
    "job.files": "files.list",
    "job.get": "files.read",
    "job.put": "files.put",
    "job.reports": "jobs.reports",
}
"""Actions of the server whose names are not those of their method."""


@dataclass(frozen=True)
class PythonCall:
    """A method of `Orchestrator`, of one of its nouns or of a job's handle."""

    name: str
    function: Callable[..., Any]

    @property
    def words(self) -> str:
        """Words of the command that does the same, perhaps with an option; "" if there is none."""
        if self.name in COMMANDS:
            return COMMANDS[self.name]
        noun, _, method = self.name.removeprefix("o.").rpartition(".")
        words = f"{GROUPS.get(noun, '')}{method.rstrip('_')}"
        return words if words in commands() else ""

    @property
    def command(self) -> Any:
        return commands()[self.words.partition(" --")[0]] if self.words else None

    @property
    def verb(self) -> Verb | None:
        action = ACTIONS.get(self.name, self.name.removeprefix("o.").rstrip("_"))
        return next((verb for verb in all_verbs() if verb.action == action), None)

    @property
    def text(self) -> str:
        """The call with its parameters."""
        parameters = inspect.signature(self.function).parameters.values()
        shown = [_parameter(p) for p in parameters if p.name not in ("self", "progress")]
        return f"{self.name}({', '.join(shown)})"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    default = parameter.default
    return f"{stars}{parameter.name}" + ("" if default is inspect.Parameter.empty else f"={default!r}")


def calls() -> Iterator[PythonCall]:
    yield from (PythonCall(name, function) for name, function in METHODS.items())
    for noun, owner in NOUNS.items():
        for name, function in vars(owner).items():
            if not name.startswith("_"):
                yield PythonCall(f"o.{noun}.{name}", function)


def commands() -> dict[str, Any]:
    """Each command that has no commands of its own, by its words."""
    return dict(_leaves(typer.main.get_command(app), ""))


def _leaves(command: Any, words: str) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", {})
    if not inner:
        yield words.strip(), command
    for name in inner:
        yield from _leaves(inner[name], f"{words} {name}")


def commands_without_call() -> list[str]:
    covered = {call.words.partition(" --")[0] for call in calls()}
    return [words for words in commands() if words not in covered]
