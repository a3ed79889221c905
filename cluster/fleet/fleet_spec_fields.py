"""Checks of single fields of a fleet file: names, variables, labels and folders."""

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from cluster.errors import SpecError
from cluster.host import copy_rate
from cluster.input import checkpoint_location
from cluster.input.validation_errors import WrongValueError

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
LABEL_KEY = re.compile(r"([a-z0-9][a-z0-9.-]{0,62}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
OUR_VARIABLES = ("RAY_", "POLYFLEET_")
SETTABLE = (
    *("POLYFLEET_CPU_ENGINE", "POLYFLEET_LOG_LIMIT_BYTES"),
    "POLYFLEET_OUTPUT_LIMIT_BYTES",  # workers/protocol/output_folder.py
    "POLYFLEET_DATA_CACHE_BYTES",  # workers/storage/data_cache.py
    "POLYFLEET_NATIVE",  # workers/native
    copy_rate.SETTING,  # cluster/host/copy_rate.py
    *(
        "POLYFLEET_CGROUP_ROOT",
        "POLYFLEET_ATTEMPT_PIDS",
        "POLYFLEET_ATTEMPT_MEMORY_BYTES",
    ),  # workers/processes/cgroup.py
)
OUR_LABELS = ("polyfleet.io/", "ray.io/")


def _name(value: str) -> str:
    if not NAME.fullmatch(value):
        raise WrongValueError(
            f"{value!r} is not a valid name", "use 1 to 31 of a-z, 0-9 and -, beginning with a letter or digit"
        )
    return value


def variables_field(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if not VARIABLE.fullmatch(name) or "\0" in text:
            raise WrongValueError(f"{name!r} cannot be an environment variable", "use letters, digits and _")
        if name.startswith(OUR_VARIABLES) and name not in SETTABLE:
            raise WrongValueError(
                f"{name} is set by Polyfleet itself", "leave it out; a pool may set any other variable"
            )
    return value


def labels_field(value: dict[str, str]) -> dict[str, str]:
    for key, text in value.items():
        if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(text):
            raise WrongValueError(
                f"{key!r}: {text!r} is not a valid label", "use up to 63 letters, digits, '-', '_' and '.'"
            )
        if key.startswith(OUR_LABELS):
            raise WrongValueError(f"{key!r} is set by Polyfleet itself", "use a prefix of your own")
    return value


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def folder_field(value: str) -> str:
    if value and (not value.startswith("/") or "\0" in value or ".." in Path(value).parts):
        raise WrongValueError(
            f"{value!r} is not an absolute path", "write the folder's path on the pool's nodes, from /"
        )
    return value


def storage_field(value: str) -> str:
    """Check a folder's path, or the URI of an object store, which contains no credentials."""
    if not checkpoint_location.is_uri(value):
        return folder_field(value)
    try:
        return str(checkpoint_location.parse_uri(value, "storage"))
    except SpecError as e:
        raise WrongValueError(e.args[1], e.remedy) from None


Name = Annotated[str, AfterValidator(_name)]
Text = Annotated[str, BeforeValidator(_number_as_text)]
Count = Annotated[int, Field(strict=True, ge=1, le=256)]
