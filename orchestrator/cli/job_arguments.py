"""From what was typed after `polyfleet submit` to a job's spec. Pure but for reading the file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import UserError
from orchestrator.spec import JobSpec, load_jobs, parse_job
from orchestrator.submission import plain

Data = dict[str, Any]
HOW = "give one job file, or a command: `polyfleet submit --accelerators cpu:1 -- python train.py`"


@dataclass(frozen=True, slots=True)
class Given:
    """Words and options as typed; "" and empty lists where nothing was. `command` is None where no `--` was typed."""

    words: list[str]
    command: list[str] | None = None
    name: str = ""
    env: list[str] | tuple[str, ...] = ()
    accelerators: str = ""
    pool: str = ""
    task: str = ""
    entry: str = ""
    working_dir: str = ""


def specs_of(given: Given) -> list[JobSpec]:
    """The jobs meant. Raises UserError or SpecError."""
    return [_changed(data, given) for data in (_from_files(given) if given.words else [_without_file(given)])]


def _changed(data: Data, given: Given) -> JobSpec:
    if given.name:
        data["name"] = given.name
    _set_variables(data, given.env)
    _choose_devices(data, given)
    return parse_job(data)


def _from_files(given: Given) -> list[Data]:
    said = " ".join(given.words)
    if given.command is not None:
        raise UserError(f"a job file, {said!r}, and a command after `--`", "keep one of them")
    if given.task or given.entry or given.working_dir:
        raise UserError(
            f"a job file, {said!r}, and --task, --entry or --working-dir",
            "write them into the file; a command goes after `--`",
        )
    return [plain(spec) for word in given.words for spec in load_jobs(Path(word))]


def _without_file(given: Given) -> Data:
    if given.command and given.task not in ("", "run"):
        said = " ".join(given.command)
        raise UserError(f"a {given.task} job takes no command: {said!r}", "use --entry, or leave --task out")
    if not given.command and (given.task == "run" or not (given.task or given.entry)):
        raise UserError("no job file" if given.command is None and not given.task else "no command", HOW)
    parts = {
        "task": given.task,
        "command": list(given.command or ()),
        "entry": given.entry,
        "working_dir": given.working_dir,
    }
    return {key: value for key, value in parts.items() if value}


def _set_variables(data: Data, pairs: list[str] | tuple[str, ...]) -> None:
    """What is typed wins over the file, in its candidates too."""
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UserError(f"--env {pair!r} is not K=V", "e.g. --env LR=0.1")
        data["env"] = data.get("env", {}) | {name: value}
        for candidate in _candidates(data):
            candidate.get("env", {}).pop(name, None)


def _choose_devices(data: Data, given: Given) -> None:
    """`--accelerators` replaces all the file says of devices but memory and nodes; `--pool` narrows what is left."""
    if given.accelerators:
        kept = {key: value for key, value in data.get("resources", {}).items() if key in ("memory", "nodes", "pool")}
        data["resources"] = kept | {"accelerators": given.accelerators}
    if given.pool:
        data["resources"] = data.get("resources", {}) | {"pool": given.pool}
        for candidate in _candidates(data):
            candidate.pop("pool", None)


def _candidates(data: Data) -> list[Data]:
    resources = data.get("resources", {})
    return [*resources.get("any_of", []), *resources.get("ordered", [])]
