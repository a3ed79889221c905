"""Convert the arguments of `polyfleet submit`, `run` and `offer` to job specs. No side effects; it only reads files."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import UserError
from orchestrator.spec import deadlines
from orchestrator.spec.job_spec import JobSpec, load_jobs, parse_job
from orchestrator.submission import env_file
from orchestrator.submission.submission import to_dict

Data = dict[str, Any]
USAGE = "name a job file, or write a command: `polyfleet submit --accelerators cpu:1 -- python train.py`"

DEVICE_FIELDS = frozenset({"accelerators", "count", "exclusive", "any_of", "ordered"})
"""Fields of `resources` that `--accelerators` replaces: all others, also new ones, are requirements of any devices."""


@dataclass(frozen=True, slots=True)
class SubmitArguments:
    """Arguments and options as typed; "" or an empty list if absent. `command` is None if there was no `--`."""

    files: list[str]
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


def build_specs(arguments: SubmitArguments) -> list[JobSpec]:
    """Build the specs of the jobs. Raises UserError or SpecError."""
    variables = _variables(arguments)
    parsed = _load_files(arguments) if arguments.files else [_build_job(arguments)]
    return [_apply_options(data, arguments, variables) for data in parsed]


def _apply_options(data: Data, arguments: SubmitArguments, variables: dict[str, str]) -> JobSpec:
    if arguments.name:
        data["name"] = arguments.name
    _set_variables(data, variables)
    if arguments.data:
        data["data"] = [*data.get("data", []), *map(_data, arguments.data)]
    _choose_devices(data, arguments)
    spec = parse_job(data)
    if spec.deadline is not None:
        deadlines.wall_s(spec.deadline, time.time())  # before a server is started for it
    return spec


def _load_files(arguments: SubmitArguments) -> list[Data]:
    names = " ".join(arguments.files)
    if arguments.command is not None:
        raise UserError(f"both a job file, {names!r}, and a command after `--` are present", "keep one of them")
    if arguments.task or arguments.entry or arguments.working_dir or arguments.launch or arguments.checkpoint:
        raise UserError(
            f"--task, --entry, --working-dir, --launch and --checkpoint cannot be combined with a job file, {names!r}",
            "write them into the file; write a command after `--`",
        )
    return [to_dict(spec) for file in arguments.files for spec in load_jobs(Path(file))]


def _build_job(arguments: SubmitArguments) -> Data:
    if arguments.command and arguments.task not in ("", "run"):
        command = " ".join(arguments.command)
        raise UserError(
            f"a {arguments.task} job cannot have a command: {command!r}", "use --entry, or leave --task out"
        )
    if not arguments.command and (arguments.task == "run" or not (arguments.task or arguments.entry)):
        raise UserError("no job file" if arguments.command is None and not arguments.task else "no command", USAGE)
    parts = {
        "task": arguments.task,
        "command": list(arguments.command or ()),
        "launch": arguments.launch,
        "entry": arguments.entry,
        "working_dir": arguments.working_dir,
        "checkpoint": {"path": arguments.checkpoint} if arguments.checkpoint else {},
    }
    return {key: value for key, value in parts.items() if value}


def _variables(arguments: SubmitArguments) -> dict[str, str]:
    """Variables of --env-file and --env. --env overrides files; a later file overrides an earlier one."""
    variables: dict[str, str] = {}
    for path in arguments.env_files:
        variables |= env_file.read(path)
    for pair in arguments.env:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UserError(f"--env {pair!r} is not of the form K=V", "write e.g. --env LR=0.1")
        variables[name] = value
    return variables


def _data(text: str) -> Data:
    uri, colon, mount = text.rpartition(":")
    if not colon or not uri or not mount or mount.startswith("//"):
        raise UserError(
            f"--data {text!r} is not of the form URI:MOUNT",
            "write e.g. --data ./tokens:data/ or --data s3://bucket/tokens:data/",
        )
    return {"uri": uri, "mount": mount}


def _set_variables(data: Data, variables: dict[str, str]) -> None:
    """Set variables; they override those of the job file and of its candidates."""
    if not variables:
        return
    data["env"] = data.get("env", {}) | variables
    for candidate in _candidates(data):
        for name in variables:
            candidate.get("env", {}).pop(name, None)


def _choose_devices(data: Data, arguments: SubmitArguments) -> None:
    """`--accelerators` replaces the file's devices, `--pool` its pools; other requirements remain."""
    resources = data.get("resources", {})
    if arguments.accelerators:
        remaining = {key: value for key, value in resources.items() if key not in DEVICE_FIELDS}
        data["resources"] = resources = remaining | {"accelerators": arguments.accelerators}
    if arguments.pool:
        for shape in (resources, *_candidates(data)):
            shape.pop("pool", None)
            shape.pop("pools", None)
        data["resources"] = resources | {"pool": arguments.pool}


def _candidates(data: Data) -> list[Data]:
    resources = data.get("resources", {})
    return [*resources.get("any_of", []), *resources.get("ordered", [])]


def find_needed_file(command: list[str], folder: Path) -> str:
    """Argument of a command that names a file in `folder`, or a module after `-m`: the command needs that folder. "" if
    there is none.
    """
    for previous, argument in zip(["", *command], command, strict=False):
        if previous == "-m":
            top = argument.partition(".")[0]
            if top.isidentifier() and ((folder / top).is_dir() or (folder / f"{top}.py").is_file()):
                return argument
        elif _is_file_of(argument, folder):
            return argument
    return ""


def missing_folder_hint(arguments: SubmitArguments, folder: Path) -> str:
    """Sentence for a command that needs `folder`, although the job gets no files. "" if there is nothing to say."""
    if arguments.working_dir or arguments.data:
        return ""
    name = find_needed_file(arguments.command or [], folder)
    return name and f"the command names {name}, but no files are sent; add --working-dir . to send this folder"


def _is_file_of(argument: str, folder: Path) -> bool:
    if not argument or argument.startswith(("-", "/", "~")) or ".." in Path(argument).parts:
        return False
    try:
        return (folder / argument).is_file()
    except (OSError, ValueError):  # the argument may be an inline script, too long for a file name
        return False
