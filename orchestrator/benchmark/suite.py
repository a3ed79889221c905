"""What a run measures: cases × precisions × levels × regimes × kernels, on columns. Pure data, checked at first."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator

from cluster.errors import nearest
from cluster.validation_errors import WrongValueError, validate_model
from workers.benchmark import catalogue
from workers.kernels import names as kernel_names

Data = dict[str, Any]


Text = Annotated[str, Field(max_length=400)]
Names = Annotated[tuple[Text, ...], Field(max_length=256)]


class BenchmarkRequest(BaseModel):
    """What a user asked for. `cases` are names, suites or patterns; `entry` names a model of their own instead.

    `kernels` are implementations of operations, the first of which the others are compared with. `rounds` and
    `max_rounds` bound what each case gets, `case_s` its time and `max_minutes` that of the run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    cases: Names = ("all",)
    scale: Literal["quick", "full"] = "quick"
    precisions: Annotated[tuple[Literal["fp32", "bf16", "fp16"], ...], Field(min_length=1)] = ("fp32",)
    levels: Annotated[tuple[Literal["O0", "O1", "O2", "O3"], ...], Field(min_length=1)] = ("O1",)
    regimes: Annotated[tuple[Literal["hot", "cold"], ...], Field(min_length=1)] = ("hot",)
    kernels: Names = ()
    rounds: Annotated[StrictInt, Field(ge=0, le=10_000)] = 0
    max_rounds: Annotated[StrictInt, Field(ge=1, le=10_000)] = 60
    case_s: Annotated[float, Field(gt=0)] = 30.0
    max_minutes: Annotated[float, Field(gt=0)] = 60.0
    seed: Annotated[StrictInt, Field(ge=0, lt=2**63)] = 0
    entry: Text = ""
    sample_input: Text = ""
    batch_size: Annotated[StrictInt, Field(ge=0)] = 0
    train: bool = True
    pools: Names = ()
    kinds: Names = ()
    all_devices: bool = False
    energy: bool = True
    priority: Annotated[StrictInt, Field(ge=-1000, le=1000)] = 0
    workload: Text = ""

    @model_validator(mode="after")
    def _rounds_fit(self) -> "BenchmarkRequest":
        if self.rounds > self.max_rounds:
            raise WrongValueError(
                f"rounds {self.rounds} are more than max_rounds {self.max_rounds}", "raise max_rounds"
            )
        return self

    @model_validator(mode="after")
    def _kernels_exist(self) -> "BenchmarkRequest":
        for name in self.kernels:
            if name not in kernel_names():
                raise WrongValueError(f"unknown kernels {name!r}", nearest(name, kernel_names()), "kernels")
        return self

    def to_plain(self) -> Data:
        """Without `kernels` where none are asked for, as before there were any."""
        plain = self.model_dump(mode="json")
        return plain if self.kernels else {name: value for name, value in plain.items() if name != "kernels"}


@dataclass(frozen=True, slots=True)
class MeasurementSettings:
    """How a case is run: one arm of each column."""

    precision: str
    level: str
    regime: str
    kernels: str = ""

    def __str__(self) -> str:
        told = f"{self.precision}/{self.level}" + ("/cold" if self.regime == "cold" else "")
        return f"{told}/{self.kernels}" if self.kernels else told


@dataclass(frozen=True, slots=True)
class CaseGroup:
    """One case in all its ways: what is measured in the same rounds."""

    case: str
    about: Data
    ways: tuple[MeasurementSettings, ...] = field(default_factory=tuple)


def request(data: Data) -> BenchmarkRequest:
    """Raises SpecError naming the field and the nearest valid value, NotFound for an unknown case."""
    made = validate_model(BenchmarkRequest, data, "")
    if not made.entry:
        catalogue.choose(made.cases, made.scale)
    return made


def groups(asked: BenchmarkRequest) -> tuple[CaseGroup, ...]:
    """In the order of the catalogue. Only operations that cross memory are measured cold, too."""
    if asked.entry:
        modes = ("forward", "train") if asked.train else ("forward",)
        name = asked.workload or asked.entry
        return tuple(CaseGroup(f"user/{name}/{mode}", _user(name, mode), tuple(_ways(asked, False))) for mode in modes)
    made = []
    for case in catalogue.choose(asked.cases, asked.scale):
        moved = case.definition.family == "transfer"
        ways = (MeasurementSettings("fp32", "O1", "hot"),) if moved else tuple(_ways(asked, case.definition.cold))
        made.append(CaseGroup(case.name, case.to_plain() | {"scale": asked.scale}, ways))
    return tuple(made)


def _ways(asked: BenchmarkRequest, cold: bool) -> Iterator[MeasurementSettings]:
    regimes = [r for r in asked.regimes if r == "hot" or cold] or ["hot"]
    for precision in asked.precisions:
        for level in asked.levels:
            for regime in regimes:
                yield from (
                    MeasurementSettings(precision, level, regime, name)
                    for name in dict.fromkeys(asked.kernels or ("",))
                )


def _user(name: str, mode: str) -> Data:
    return {"case": f"user/{name}/{mode}", "workload": name, "family": "model", "mode": mode, "about": "a user's model",
            "sizes": {}, "flops": None, "item": "sample", "items": None, "scale": "full"}  # fmt: skip
