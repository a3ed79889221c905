"""From what was typed after `polyfleet submit` to a job's spec. Pure but for reading the file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import UserError
from orchestrator.spec import JobSpec, load_job, parse_job
from orchestrator.submission import plain

Data = dict[str, Any]
HOW = "give one job file, or `--task run --accelerators cpu:1 -- COMMAND...`"


@dataclass(frozen=True, slots=True)
class Given:
    """Words and options as typed; "" and empty lists where nothing was."""

    words: list[str]
    name: str = ""
    env: list[str] | tuple[str, ...] = ()
    accelerators: str = ""
    pool: str = ""
    task: str = ""
    entry: str = ""
    working_dir: str = ""


def spec_of(given: Given) -> JobSpec:
    """The job meant. Raises UserError or SpecError."""
    data = _without_file(given) if given.task else _from_file(given)
    if given.name:
        data["name"] = given.name
    _set_variables(data, given.env)
    _choose_devices(data, given)
    return parse_job(data)


def _from_file(given: Given) -> Data:
    if given.entry or given.working_dir:
        raise UserError(
            "--entry and --working-dir are for jobs without a file", "give --task too, or write them into the file"
        )
    if len(given.words) != 1:
        raise UserError("no job file" if not given.words else "a job file and more words", HOW)
    return plain(load_job(Path(given.words[0])))


def _without_file(given: Given) -> Data:
    if given.task != "run" and given.words:
        raise UserError(f"a {given.task} job takes no command: {' '.join(given.words)!r}", "use --entry, or --task run")
    if given.task == "run" and not given.words:
        raise UserError("no command", HOW)
    parts = {"command": list(given.words), "entry": given.entry, "working_dir": given.working_dir}
    return {"task": given.task} | {key: value for key, value in parts.items() if value}


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
