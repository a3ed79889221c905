"""Types of single fields of a job's spec: the accepted text, the error for any other, and the value in the core."""

import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, StrictInt, WithJsonSchema

from cluster.catalogue import FEATURES, feature_choices, model, resolve_kind, vendors
from cluster.catalogue.precision import FLOATS, PRECISIONS, SHORT, long_name
from cluster.errors import SpecError, UserError, nearest
from cluster.fleet.projects import plain_name
from cluster.host.content_cache import SHA
from cluster.input import checkpoint_location
from cluster.input.checkpoint_location import path_error
from cluster.input.folder_access import normalize_path
from cluster.input.sizes import size_bytes
from cluster.input.text_fields import WrittenAs
from cluster.input.validation_errors import WrongValueError, prefix_field
from orchestrator.spec import deadlines
from orchestrator.spec.checkpoint_address import is_local_path
from orchestrator.spec.core_fields import CoreForm
from orchestrator.spec.resource_syntax import (
    DeviceRequest,
    accelerators,
    duration_s,
    hang_after_s,
    with_count,
)
from workers.protocol.messages import CHECKPOINT_FORMATS, LAUNCHES, OWN_FOLDER
from workers.protocol.rank_events import MAX_STEP

JOB_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
ENTRY = re.compile(r"(?![/.])(?P<where>[A-Za-z0-9_./-]+?)(:(?P<function>[A-Za-z_]\w*))?", re.ASCII)
TRANSFORMERS = re.compile(r"transformers:([a-z0-9][a-z0-9_-]*|(?![/.])[A-Za-z0-9_./-]+\.json)", re.ASCII)
SECRET = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*|file:/[^\0]+")
MAX_SECRETS = 100
MAX_VARIABLE_BYTES = 64 << 10
"""Linux itself allows 128 KiB."""
DATA_FORMS = "write s3://BUCKET/PREFIX, POOL:PATH, or a path of this machine"
RESERVED_PREFIXES = ("POLYFLEET_", "RAY_")
MAX_DURATION_S = 7 * 86400.0


def _accelerators(value: Any) -> Any:
    if value is not None:
        prefix_field(accelerators, value)
    return value


def _memory(value: Any) -> Any:
    if value is not None:
        prefix_field(size_bytes, value)
    return value


def _duration(value: Any) -> Any:
    if prefix_field(duration_s, value) > MAX_DURATION_S:
        raise WrongValueError(f"{value} is longer than 7 days", "write a shorter time")
    return value


def _deadline(value: Any) -> Any:
    if value is not None and (reason := deadlines.deadline_error(value)):
        raise WrongValueError(reason, deadlines.FORMS)
    return value


def _hang_after(value: Any) -> Any:
    return _duration(value) if prefix_field(hang_after_s, value) > 0 else value


def _name(value: str) -> str:
    if value and not JOB_NAME.fullmatch(value):
        remedy = "use up to 63 letters, digits, '-' and '_', a letter or digit first and last"
        raise WrongValueError(f"{value!r} is not a valid name", remedy)
    return value


def _entry(value: str) -> str:
    if TRANSFORMERS.fullmatch(value) and ".." not in value:
        return value
    match = ENTRY.fullmatch(value)
    if value and not (match and ".." not in match["where"].split("/") and _is_file_or_module(match["where"])):
        raise WrongValueError(
            f"{value!r} does not name a function",
            "write file.py:function, package.module:function or transformers:TYPE",
        )
    return value


def _is_file_or_module(where: str) -> bool:
    return where.endswith(".py") or all(part.isidentifier() for part in where.split("."))


def _command(value: Any) -> Any:
    """A command line for the shell, or a list of the program and its arguments."""
    if value in ("", (), []):
        return ""
    arguments = list(value) if isinstance(value, list | tuple) else [value]
    for number, argument in enumerate(arguments if isinstance(value, list | tuple) else (), 1):
        if not isinstance(argument, str):
            text = "null" if argument is None else f"{argument!r:.60}"
            raise WrongValueError(f"item {number} is {text}, not text", "put it in quotes")
    if not isinstance(arguments[0], str) or any("\0" in argument for argument in arguments) or not arguments[0].strip():
        raise WrongValueError(
            "must be a command line for the shell or a list of its arguments",
            'write e.g. command: ["python", "train.py"]',
        )
    return value if isinstance(value, str) else tuple(arguments)


def command_arguments(command: Any) -> tuple[str, ...]:
    """Program and arguments of a command; a command line is run by the shell."""
    return ("/bin/sh", "-c", command) if command and isinstance(command, str) else tuple(command)


def _variables(value: Any) -> Any:
    if not isinstance(value, dict):
        raise WrongValueError("must be a mapping, NAME: value")
    return {name: variable(str(name), text) for name, text in value.items()}


def variable(name: str, value: Any) -> str:
    """Return the value of an environment variable as text. Raises WrongValueError."""
    _check_variable_name(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or "\0" in value:
        empty = ', "" for empty text' if value is None else ""
        raise WrongValueError(f"{name} must be text or a number", f"put the value in quotes{empty}")
    if len(value.encode("utf-8", "replace")) > MAX_VARIABLE_BYTES:
        raise WrongValueError(f"{name} is longer than {MAX_VARIABLE_BYTES} bytes", "send large data as files")
    return value


def _check_variable_name(name: str) -> None:
    if not VARIABLE.fullmatch(name):
        raise WrongValueError(f"{name!r} cannot be an environment variable", "use letters, digits and _")
    if name.startswith(RESERVED_PREFIXES) or any(name == row.visibility for row in vendors().values()):
        raise WrongValueError(f"{name} is set by Polyfleet itself", "leave it out; any other name may be set")


def _secrets(value: Any) -> Any:
    """Check references to secrets. Errors never show the written value: it may be the secret itself."""
    if not isinstance(value, dict):
        raise WrongValueError("must be a mapping of names to references", "write e.g. HF_TOKEN: env:HF_TOKEN")
    if len(value) > MAX_SECRETS:
        raise WrongValueError(f"has {len(value)} secrets; the maximum is {MAX_SECRETS}", "put several into one file")
    for name, reference in value.items():
        _check_variable_name(str(name))
        if not isinstance(reference, str) or not SECRET.fullmatch(reference):
            remedy = f"write {name}: env:NAME (a variable of the server) or file:/absolute/path, never the value"
            raise WrongValueError(f"{name} is not a reference to a secret", remedy)
    return value


def _precision(value: str) -> str:
    if value and value not in PRECISIONS:
        raise WrongValueError(f"unknown precision {value!r}", nearest(value, PRECISIONS))
    return value


def _dtype(value: str) -> str:
    if value not in DTYPES:
        raise WrongValueError(f"unknown dtype {value!r}", nearest(value, DTYPES))
    return long_name(value)


def _feature(value: str) -> str:
    if value not in (features := feature_choices()):
        raise WrongValueError(f"unknown feature {value!r}", nearest(value, features))
    return value


def _launch(value: str) -> str:
    if value and value not in LAUNCHES:
        raise WrongValueError(f"unknown launch {value!r}", nearest(value, LAUNCHES))
    return value


def _script_path(value: str) -> str:
    if not value:
        return value
    try:
        path = normalize_path(value)
    except UserError as e:
        raise WrongValueError(e.message, "write a path in $POLYFLEET_OUTPUT_DIR, such as ckpt.pt") from None
    if not path or path.partition("/")[0].startswith(OWN_FOLDER):
        reason = "is where Polyfleet keeps its copy" if path else "is the complete folder"
        raise WrongValueError(f"{value!r} {reason}", "name a file or folder in it, such as ckpt.pt")
    return path


def _script_format(value: str) -> str:
    if value not in CHECKPOINT_FORMATS:
        raise WrongValueError(f"unknown format {value!r}", nearest(value, CHECKPOINT_FORMATS))
    return value


def _resume_from(value: str) -> str:
    if value:
        try:
            checkpoint_location.parse_pool_path(value, "", pool="any")
        except UserError as e:
            remedy = "write POOL:PATH, or PATH in the pool the job runs in"
            raise WrongValueError(f"is not a checkpoint: {e.message}", remedy) from None
    return value


def _data_uri(value: str) -> str:
    """Check a location of data: a URI of an object store, POOL:PATH, or a path of this machine."""
    if not value or "\0" in value:
        raise WrongValueError("must name data", DATA_FORMS)
    if value.startswith("file://"):
        raise WrongValueError(f"{value[:200]!r} is a file of this machine", "write its path, without file://")
    if checkpoint_location.is_uri(value):
        _parse_location(checkpoint_location.parse_uri, value)
    elif not is_local_path(value) and _parse_location(checkpoint_location.parse_pool_path, value).path.startswith("."):
        raise WrongValueError(f"{value!r} is hidden in the pool's storage", "name a folder of a job, JOB/output/…")
    return value


def _parse_location(
    parse: Callable[[str], checkpoint_location.CheckpointLocation], value: str
) -> checkpoint_location.CheckpointLocation:
    try:
        return parse(value)
    except SpecError as e:
        raise WrongValueError(e.message.removeprefix(f"{e.field}: "), e.remedy) from None


def _mount(value: str) -> str:
    plain = "/".join(part for part in value.split("/") if part not in ("", "."))
    if value.startswith("/") or path_error(plain):
        reason = "it is absolute" if value.startswith("/") else path_error(plain)
        raise WrongValueError(f"{value[:200]!r} is not in the job's folder: {reason}", "write e.g. data/")
    return value


def _sha256(value: str) -> str:
    if value and not SHA.fullmatch(value.lower()):
        raise WrongValueError(f"{value[:80]!r} is not a SHA-256", "write the 64 digits that `sha256sum` prints")
    return value.lower()


def _device_kind(value: str) -> str:
    """The kind in the catalogue's spelling. Refuses a back end with many models, since a speed is that of a model."""
    kind = prefix_field(resolve_kind, value)
    if ":" not in kind and model(kind) is None:
        raise WrongValueError(f"{value!r} is a back end with many models", "name one of them, e.g. nvidia:H100")
    return kind


def _number(value: Any) -> Any:
    if value is not None:
        prefix_field(with_count, DeviceRequest(()), value)
    return value


NUMBER = {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 1}]}
SHAPES = [{"type": "string"}, {"type": "array", "items": {}}, {"type": "object"}]
Accelerators = Annotated[
    Any,
    AfterValidator(_accelerators),
    WithJsonSchema({"anyOf": SHAPES, "examples": ["nvidia:H100:8", ["tpu:v5e:4", "cpu"], {"H100": 8}]}),
]
Number = Annotated[Any, AfterValidator(_number), WithJsonSchema(NUMBER)]
Size = Annotated[
    Any,
    WrittenAs(str),
    AfterValidator(_memory),
    CoreForm(size_bytes, suffix="_bytes"),
    WithJsonSchema({"type": "string", "examples": ["16GB", "16GiB"]}),
]
Price = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Duration = Annotated[
    Any,
    AfterValidator(_duration),
    CoreForm(duration_s, suffix="_s"),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "number", "minimum": 0}], "examples": ["30s", "5m"]}),
]
Deadline = Annotated[
    Any,
    AfterValidator(_deadline),
    WithJsonSchema(
        {
            "anyOf": [{"type": "string"}, {"type": "number", "exclusiveMinimum": 0}],
            "examples": ["2026-12-01T18:00:00Z", "6h"],
        }
    ),
]
HangAfter = Annotated[
    Any,
    AfterValidator(_hang_after),
    CoreForm(hang_after_s, suffix="_s"),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "number", "minimum": 5}], "examples": ["10m", "never"]}),
]
DeviceKind = Annotated[
    str, AfterValidator(_device_kind), WithJsonSchema({"type": "string", "examples": ["nvidia:H100", "tpu:v5e", "cpu"]})
]
ProjectName = Annotated[str, AfterValidator(lambda name: plain_name(name) if name else name)]
Weight = Annotated[float, Field(strict=True, ge=0.01, le=100, allow_inf_nan=False)]
Hours = Annotated[float, Field(strict=True, gt=0, le=1e6, allow_inf_nan=False)]
Steps = Annotated[StrictInt, Field(ge=1, le=MAX_STEP)]
Command = Annotated[
    Any,
    WrittenAs(str | list[str]),
    AfterValidator(_command),
    CoreForm(command_arguments),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}),
]
Name = Annotated[str, AfterValidator(_name)]
Workload = Annotated[str, Field(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]
Entry = Annotated[str, AfterValidator(_entry)]
ResumeFrom = Annotated[str, AfterValidator(_resume_from)]
DataUri = Annotated[
    str,
    AfterValidator(_data_uri),
    WithJsonSchema({"type": "string", "examples": ["s3://bucket/prefix", "cpu:digits-3f9a2c/output", "./tokens"]}),
]
MountPath = Annotated[
    str, AfterValidator(_mount), WithJsonSchema({"type": "string", "examples": ["data/", "data/train.bin"]})
]
Sha256 = Annotated[str, AfterValidator(_sha256)]
ScriptPath = Annotated[str, AfterValidator(_script_path)]
ScriptFormat = Annotated[str, AfterValidator(_script_format), WithJsonSchema({"enum": list(CHECKPOINT_FORMATS)})]
Variables = Annotated[dict[str, str], BeforeValidator(_variables), CoreForm(name="environment")]
Secrets = Annotated[dict[str, str], BeforeValidator(_secrets)]
Count = Annotated[StrictInt, Field(ge=1, le=4096)]
BatchSize = Annotated[StrictInt, Field(ge=0, le=1 << 30)]
Launch = Annotated[str, AfterValidator(_launch), WithJsonSchema({"enum": list(LAUNCHES)})]
DTYPES = (*SHORT, *FLOATS)
PoolNames = Annotated[tuple[Annotated[str, Field(min_length=1, max_length=64)], ...], Field(max_length=64)]
Dtype = Annotated[str, AfterValidator(_dtype), WithJsonSchema({"enum": list(DTYPES)})]
Dtypes = Annotated[tuple[Dtype, ...], Field(max_length=8)]
Feature = Annotated[str, AfterValidator(_feature), WithJsonSchema({"type": "string", "examples": list(FEATURES)})]
Features = Annotated[tuple[Feature, ...], Field(max_length=8)]
Precision = Annotated[str, AfterValidator(_precision), WithJsonSchema({"enum": list(PRECISIONS)})]
