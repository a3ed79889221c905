"""What a fleet file says: pools, the environment of each, what nodes are told. `polyfleet schema fleet` shows it."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from cluster import environments, recipes, requirements
from cluster.catalogue import backend_name, own_vendors
from cluster.errors import SpecError, UserError, nearest
from cluster.validation import WrongValueError, checked, in_field
from cluster.yaml import MAX_BYTES, load

FLEETS = Path(__file__).parent / "fleets"

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
LABEL_KEY = re.compile(r"([a-z0-9][a-z0-9.-]{0,62}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
OUR_VARIABLES = ("RAY_", "POLYFLEET_")
SETTABLE = (
    *("POLYFLEET_CPU_ENGINE", "POLYFLEET_LOG_LIMIT_BYTES"),
    *("POLYFLEET_CGROUP_ROOT", "POLYFLEET_ATTEMPT_PIDS", "POLYFLEET_ATTEMPT_MEMORY_BYTES"),  # workers/attempt/cgroup.py
)
OUR_LABELS = ("polyfleet.io/", "ray.io/")


def _name(value: str) -> str:
    if not NAME.fullmatch(value):
        raise WrongValueError(f"{value!r} is no name", "use 1 to 31 of a-z, 0-9 and -, a letter or digit first")
    return value


def _variables(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if not VARIABLE.fullmatch(name) or "\0" in text:
            raise WrongValueError(f"{name!r} cannot be an environment variable", "use letters, digits and _")
        if name.startswith(OUR_VARIABLES) and name not in SETTABLE:
            raise WrongValueError(
                f"{name} is set by Polyfleet itself", "leave it out; a pool may set any other variable"
            )
    return value


def _labels(value: dict[str, str]) -> dict[str, str]:
    for key, text in value.items():
        if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(text):
            raise WrongValueError(f"{key!r}: {text!r} is no label", "use up to 63 letters, digits, '-', '_' and '.'")
        if key.startswith(OUR_LABELS):
            raise WrongValueError(f"{key!r} is set by Polyfleet itself", "use a prefix of your own")
    return value


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _requirements(value: tuple[str, ...]) -> tuple[str, ...]:
    for line in value:
        if not requirements.plain_requirement(line):
            raise WrongValueError(
                f"{line[:200]!r} is no requirement of a package by name",
                "write NAME[EXTRAS] and versions, such as `torch==2.9.0`; indexes and credentials belong in pip's own"
                " settings, and what no index has into an environment named by `interpreter`",
            )
    return value


def _interpreter(value: str) -> str:
    if value not in ("", environments.CURRENT) and not value.startswith("/"):
        raise WrongValueError(f"{value!r} is no absolute path", "name its `python` file from /, or write `current`")
    return value


def _folder(value: str) -> str:
    if value and (not value.startswith("/") or "\0" in value or ".." in Path(value).parts):
        raise WrongValueError(f"{value!r} is no absolute path", "name the folder as the pool's nodes see it, from /")
    return value


Name = Annotated[str, AfterValidator(_name)]
Text = Annotated[str, BeforeValidator(_number_as_text)]
Count = Annotated[int, Field(strict=True, ge=1, le=256)]


class EnvironmentSpec(BaseModel, extra="forbid", frozen=True):
    """The Python of a pool's nodes: exactly one of the three. A word alone is the name of a lock."""

    lock: str = Field(default="", description=f"An environment that comes with Polyfleet: {', '.join(recipes.NAMES)}")
    interpreter: Annotated[str, AfterValidator(_interpreter)] = Field(
        "", description="A `python` file that has Ray and torch, or `current`: the one that runs this"
    )
    requirements: Annotated[tuple[str, ...], AfterValidator(_requirements)] = Field(
        default=(), max_length=500, description="Packages to install; Ray and what a node needs are added"
    )

    @model_validator(mode="before")
    @classmethod
    def _from_word(cls, data: Any) -> Any:
        return {"lock": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _exactly_one(self) -> "EnvironmentSpec":
        others = "{interpreter: current} or {requirements: [torch==2.9.0]}"
        if sum(map(bool, (self.lock, self.interpreter, self.requirements))) != 1:
            raise WrongValueError(
                "must be exactly one of lock, interpreter, requirements",
                f"write one of {', '.join(recipes.NAMES)}, {others}",
            )
        if self.lock and self.lock not in recipes.NAMES:
            raise WrongValueError(
                f"unknown environment {self.lock!r}", f"{nearest(self.lock, recipes.NAMES)}; or {others}"
            )
        return self

    @property
    def name(self) -> str:
        """Short, fit for a label, equal for equal environments: ranks of one group must agree on it."""
        if self.lock or self.interpreter == environments.CURRENT:
            return self.lock or self.interpreter
        content = self.interpreter or "\n".join(sorted(self.requirements))
        kind = "python" if self.interpreter else "requirements"
        return f"{kind}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"enum": list(recipes.NAMES)}, handler.resolve_ref_schema(handler(schema))]}


class PoolSpec(BaseModel, extra="forbid", frozen=True):
    """Nodes that are alike: one backend, one environment, one price."""

    backend: Annotated[str, AfterValidator(lambda word: in_field(backend_name, word))] = Field(
        description=f"Vendor's software path: {', '.join(own_vendors())}, an alias, or one that is installed"
    )
    environment: EnvironmentSpec = Field(
        default=EnvironmentSpec(interpreter=environments.CURRENT), description="Python of its nodes"
    )
    nodes: Count = Field(default=1, description="Ray nodes to start on this machine")
    devices: Count = Field(default=1, description="Into how many devices a CPU, or XLA on the CPU, is split")
    env: Annotated[dict[str, Text], AfterValidator(_variables)] = Field(
        default={}, description="Variables set for its nodes"
    )
    labels: Annotated[dict[str, str], AfterValidator(_labels)] = Field(
        default={}, description="Ray labels of its nodes"
    )
    price_per_hour: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = Field(
        default=0.0, description="Of one device, in any one currency"
    )
    storage: Annotated[str, AfterValidator(_folder)] = Field(
        default="", description="Checkpoint folder as its nodes see it"
    )
    optional: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="Leave the pool out, with words, where its environment cannot exist"
    )

    @model_validator(mode="after")
    def _countable(self) -> "PoolSpec":
        if self.devices > 1 and self.backend != "cpu" and not self.emulated:
            raise WrongValueError(
                f"{self.devices} would split a CPU, but {self.backend} devices are counted where they are",
                "leave it out; limit a job by its resources instead",
                field="devices",
            )
        return self

    @property
    def emulated(self) -> bool:
        """Computes on the CPU whatever its backend: XLA with its CPU runtime."""
        return self.backend == "tpu" and self.env.get("PJRT_DEVICE") == "CPU"

    @property
    def environment_name(self) -> str:
        return self.environment.name


class FleetSpec(BaseModel, extra="forbid", frozen=True):
    """All pools of one fleet."""

    name: Name = Field(default="local", description="What status and reports call it")
    pools: Annotated[dict[Name, PoolSpec], Field(min_length=1, max_length=64)] = Field(
        description="By name: 1 to 31 of a-z, 0-9 and -"
    )


def parse_fleet(data: Any, source: str = "") -> FleetSpec:
    """Raises SpecError naming the field."""
    return checked(FleetSpec, data, source)


def load_fleet(path: Path) -> FleetSpec:
    """The fleet file at `path`. Raises SpecError with field or line, UserError when the file cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1).decode()
    except OSError as e:
        raise UserError(
            f"cannot read {path}: {e.strerror}", "name a fleet file; `polyfleet schema fleet` tells its form"
        ) from None
    except UnicodeDecodeError as e:
        raise SpecError("", f"{path}: byte {e.start} is not UTF-8", "save the file as UTF-8 text") from None
    return parse_fleet(load(text, str(path)), str(path))


def fleet_schema() -> dict[str, Any]:
    """JSON Schema of a fleet file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | FleetSpec.model_json_schema()


def default_fleet(found: Iterable[str] = ()) -> FleetSpec:
    """One pool, named after its backend, for each backend in `found`; a `cpu` pool where nothing was found."""
    backends = list(dict.fromkeys(map(backend_name, found))) or ["cpu"]
    return parse_fleet({"pools": {backend: {"backend": backend} for backend in backends}})


def demo_fleet(found: Iterable[str] = ()) -> tuple[FleetSpec, list[tuple[str, str]]]:
    """The demo's pools and those of the accelerators in `found`, as far as they are `possible` here."""
    fleet = load_fleet(FLEETS / "demo.yaml")
    accelerators = {b: PoolSpec(backend=b) for b in map(backend_name, found) if b != "cpu"}
    return possible(fleet.model_copy(update={"pools": accelerators | fleet.pools}))


def possible(fleet: FleetSpec) -> tuple[FleetSpec, list[tuple[str, str]]]:
    """The fleet without its optional pools whose environment cannot exist here; and which those are, and why.

    Asked are system, Python and disk (`environments.refusal`). Whether packages can be fetched shows when they are.
    """
    reasons = {name: environments.refusal(pool.environment) for name, pool in fleet.pools.items() if pool.optional}
    left_out = [(name, why) for name, why in reasons.items() if why]
    kept = {name: pool for name, pool in fleet.pools.items() if not reasons.get(name)}
    return fleet.model_copy(update={"pools": kept}), left_out
