"""Checks of single fields of a fleet file: names, variables, labels, and the Python of a pool's nodes."""

import hashlib
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from cluster import environments, recipes, requirements
from cluster.errors import nearest
from cluster.validation_errors import WrongValueError

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
LABEL_KEY = re.compile(r"([a-z0-9][a-z0-9.-]{0,62}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
OUR_VARIABLES = ("RAY_", "POLYFLEET_")
SETTABLE = (
    *("POLYFLEET_CPU_ENGINE", "POLYFLEET_LOG_LIMIT_BYTES"),
    "POLYFLEET_OUTPUT_LIMIT_BYTES",  # workers/attempt/output_folder.py
    "POLYFLEET_DATA_CACHE_BYTES",  # workers/data_cache.py
    "POLYFLEET_NATIVE",  # workers/native
    *("POLYFLEET_CGROUP_ROOT", "POLYFLEET_ATTEMPT_PIDS", "POLYFLEET_ATTEMPT_MEMORY_BYTES"),  # workers/attempt/cgroup.py
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


def _requirements(value: tuple[str, ...]) -> tuple[str, ...]:
    for line in value:
        if not requirements.is_plain_requirement(line):
            raise WrongValueError(
                f"{line[:200]!r} is not a requirement of a package by name",
                "write NAME[EXTRAS] and versions, such as `torch==2.9.0`; put indexes and credentials into pip's own"
                " settings; for what no index has, name an environment with `interpreter`",
            )
    return value


def _interpreter(value: str) -> str:
    if value not in ("", environments.CURRENT) and not value.startswith("/"):
        raise WrongValueError(
            f"{value!r} is not an absolute path", "write the path of its `python` file from /, or `current`"
        )
    return value


def folder_field(value: str) -> str:
    if value and (not value.startswith("/") or "\0" in value or ".." in Path(value).parts):
        raise WrongValueError(
            f"{value!r} is not an absolute path", "write the folder's path on the pool's nodes, from /"
        )
    return value


Name = Annotated[str, AfterValidator(_name)]
Text = Annotated[str, BeforeValidator(_number_as_text)]
Count = Annotated[int, Field(strict=True, ge=1, le=256)]


class EnvironmentSpec(BaseModel, extra="forbid", frozen=True):
    """The Python of a pool's nodes: exactly one of the three fields. A string alone is the name of a lock."""

    lock: str = Field(
        default="", description=f"Name of an environment that comes with Polyfleet: {', '.join(recipes.NAMES)}"
    )
    interpreter: Annotated[str, AfterValidator(_interpreter)] = Field(
        "", description="Path of a `python` that has torch, or `current`: the Python that runs Polyfleet"
    )
    requirements: Annotated[tuple[str, ...], AfterValidator(_requirements)] = Field(
        default=(),
        max_length=500,
        description="Packages to install; Ray and Polyfleet's own requirements are added",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, data: Any) -> Any:
        return {"lock": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _exactly_one(self) -> "EnvironmentSpec":
        alternatives = "{interpreter: current} or {requirements: [torch==2.9.0]}"
        if sum(map(bool, (self.lock, self.interpreter, self.requirements))) != 1:
            raise WrongValueError(
                "must be exactly one of lock, interpreter, requirements",
                f"write one of {', '.join(recipes.NAMES)}, {alternatives}",
            )
        if self.lock and self.lock not in recipes.NAMES:
            raise WrongValueError(
                f"unknown environment {self.lock!r}", f"{nearest(self.lock, recipes.NAMES)}; or {alternatives}"
            )
        return self

    @property
    def is_named(self) -> bool:
        """Whether the user names an interpreter of their own."""
        return self.interpreter not in ("", environments.CURRENT)

    @property
    def name(self) -> str:
        """Short name, valid as a label and equal for equal environments: ranks of one group must agree on it."""
        if self.lock or self.interpreter == environments.CURRENT:
            return self.lock or self.interpreter
        content = self.interpreter or "\n".join(sorted(self.requirements))
        kind = "python" if self.interpreter else "requirements"
        return f"{kind}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"enum": list(recipes.NAMES)}, handler.resolve_ref_schema(handler(schema))]}
