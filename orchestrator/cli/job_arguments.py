"""From what was typed after `polyfleet submit` or `run` to a job's spec. Pure but for reading files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import UserError
from orchestrator import env_file
from orchestrator.job_spec import JobSpec, load_jobs, parse_job
from orchestrator.submission import to_dict

Data = dict[str, Any]
HOW = "give one job file, or a command: `polyfleet submit --accelerators cpu:1 -- python train.py`"


@dataclass(frozen=True, slots=True)
class SubmitArguments:
    """Words and options as typed; "" and empty lists where nothing was. `command` is None where no `--` was typed."""

    words: list[str]
    command: list[str] | None = None
    name: str = ""
    env: list[str] | tuple[str, ...] = ()
    env_files: list[Path] | tuple[Path, ...] = ()
    accelerators: str = ""
    pool: str = ""
    task: str = ""
    entry: str = ""
    working_dir: str = ""
    launch: str = ""
    data: list[str] | tuple[str, ...] = ()
    checkpoint: str = ""


def specs_of(given: SubmitArguments) -> list[JobSpec]:
    """The jobs meant. Raises UserError or SpecError."""
    variables = _variables(given)
    found = _from_files(given) if given.words else [_without_file(given)]
    return [_changed(data, given, variables) for data in found]


def _changed(data: Data, given: SubmitArguments, variables: dict[str, str]) -> JobSpec:
    if given.name:
        data["name"] = given.name
    _set_variables(data, variables)
    if given.data:
        data["data"] = [*data.get("data", []), *map(_data, given.data)]
    _choose_devices(data, given)
    return parse_job(data)


def _from_files(given: SubmitArguments) -> list[Data]:
    said = " ".join(given.words)
    if given.command is not None:
        raise UserError(f"a job file, {said!r}, and a command after `--`", "keep one of them")
    if given.task or given.entry or given.working_dir or given.launch or given.checkpoint:
        raise UserError(
            f"a job file, {said!r}, and --task, --entry, --working-dir, --launch or --checkpoint",
            "write them into the file; a command goes after `--`",
        )
    return [to_dict(spec) for word in given.words for spec in load_jobs(Path(word))]


def _without_file(given: SubmitArguments) -> Data:
    if given.command and given.task not in ("", "run"):
        said = " ".join(given.command)
        raise UserError(f"a {given.task} job takes no command: {said!r}", "use --entry, or leave --task out")
    if not given.command and (given.task == "run" or not (given.task or given.entry)):
        raise UserError("no job file" if given.command is None and not given.task else "no command", HOW)
    parts = {
        "task": given.task,
        "command": list(given.command or ()),
        "launch": given.launch,
        "entry": given.entry,
        "working_dir": given.working_dir,
        "checkpoint": {"path": given.checkpoint} if given.checkpoint else {},
    }
    return {key: value for key, value in parts.items() if value}


def _variables(given: SubmitArguments) -> dict[str, str]:
    """Of --env-file and --env; the latter win, and among files the last."""
    found: dict[str, str] = {}
    for path in given.env_files:
        found |= env_file.read(path)
    for pair in given.env:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UserError(f"--env {pair!r} is not K=V", "e.g. --env LR=0.1")
        found[name] = value
    return found


def _data(text: str) -> Data:
    uri, colon, mount = text.rpartition(":")
    if not colon or not uri or not mount or mount.startswith("//"):
        raise UserError(f"--data {text!r} is not URI:MOUNT", "e.g. --data ./tokens:data/ or s3://bucket/tokens:data/")
    return {"uri": uri, "mount": mount}


def _set_variables(data: Data, variables: dict[str, str]) -> None:
    """What is typed wins over the job file, in its candidates too."""
    if not variables:
        return
    data["env"] = data.get("env", {}) | variables
    for candidate in _candidates(data):
        for name in variables:
            candidate.get("env", {}).pop(name, None)


def _choose_devices(data: Data, given: SubmitArguments) -> None:
    """`--accelerators` replaces all the file says of devices but memory, nodes, price; --pool narrows what is left."""
    if given.accelerators:
        stays = ("memory", "nodes", "pool", "max_price")
        kept = {key: value for key, value in data.get("resources", {}).items() if key in stays}
        data["resources"] = kept | {"accelerators": given.accelerators}
    if given.pool:
        data["resources"] = data.get("resources", {}) | {"pool": given.pool}
        for candidate in _candidates(data):
            candidate.pop("pool", None)


def _candidates(data: Data) -> list[Data]:
    resources = data.get("resources", {})
    return [*resources.get("any_of", []), *resources.get("ordered", [])]


def folder_needed(command: list[str], here: Path) -> str:
    """What in `here` a command names, so that it needs that folder: a file, or a module after `-m`; "" for nothing."""
    for before, word in zip(["", *command], command, strict=False):
        if before == "-m":
            top = word.partition(".")[0]
            if top.isidentifier() and ((here / top).is_dir() or (here / f"{top}.py").is_file()):
                return word
        elif _is_file_of(word, here):
            return word
    return ""


def _is_file_of(word: str, here: Path) -> bool:
    if not word or word.startswith(("-", "/", "~")) or ".." in Path(word).parts:
        return False
    try:
        return (here / word).is_file()
    except (OSError, ValueError):  # a script may stand there, too long for a name
        return False
