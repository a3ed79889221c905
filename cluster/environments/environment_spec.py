"""Field of a fleet file for the Python of a pool's nodes."""

import hashlib
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from cluster.environments import environments, recipes, requirements
from cluster.errors import nearest
from cluster.input.validation_errors import WrongValueError


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
