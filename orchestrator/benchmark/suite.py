"""What a run measures: cases × precisions × levels × regimes × kernels, on each target. Validated, pure data."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator

from cluster.errors import nearest
from cluster.input.validation_errors import WrongValueError, validate_model
from workers.benchmark.cases import catalogue
from workers.kernels import names as kernel_names

Data = dict[str, Any]


Text = Annotated[str, Field(max_length=400)]
Names = Annotated[tuple[Text, ...], Field(max_length=256)]


class BenchmarkRequest(BaseModel):
    """Options of a run. `cases` are names, suites or patterns; `entry` is a user's own model instead.

    `kernels` are implementations of operations; the others are compared with the first. `rounds` and `max_rounds` limit
    the rounds of each case, `case_s` its time in seconds and `max_minutes` the time of the run.
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
                f"rounds ({self.rounds}) is larger than max_rounds ({self.max_rounds})", "raise max_rounds"
            )
        return self

    @model_validator(mode="after")
    def _kernels_exist(self) -> "BenchmarkRequest":
        for name in self.kernels:
            if name not in kernel_names():
                raise WrongValueError(f"unknown kernels {name!r}", nearest(name, kernel_names()), "kernels")
        return self

    def to_plain(self) -> Data:
        return self.model_dump(mode="json")


@dataclass(frozen=True, slots=True)
class MeasurementSettings:
    """Settings of one measurement; with a target they are a configuration."""

    precision: str
    level: str
    regime: str
    kernels: str = ""

    def __str__(self) -> str:
        name = f"{self.precision}/{self.level}" + ("/cold" if self.regime == "cold" else "")
        return f"{name}/{self.kernels}" if self.kernels else name


@dataclass(frozen=True, slots=True)
class CaseGroup:
    """One case with all its settings, which are measured in the same rounds."""

    case: str
    about: Data
    settings: tuple[MeasurementSettings, ...] = field(default_factory=tuple)


def request(data: Data) -> BenchmarkRequest:
    """Parse a request. Raises SpecError naming the field and the nearest valid value, NotFound for an unknown case."""
    parsed = validate_model(BenchmarkRequest, data, "")
    if not parsed.entry:
        catalogue.choose(parsed.cases, parsed.scale)
    return parsed


def groups(benchmark: BenchmarkRequest) -> tuple[CaseGroup, ...]:
    """List the cases in the order of the catalogue. Only memory-bound operations are also measured cold."""
    if benchmark.entry:
        modes = ("forward", "train") if benchmark.train else ("forward",)
        name = benchmark.workload or benchmark.entry
        return tuple(
            CaseGroup(f"user/{name}/{mode}", _user(name, mode), tuple(_all_settings(benchmark, False)))
            for mode in modes
        )
    result = []
    for case in catalogue.choose(benchmark.cases, benchmark.scale):
        is_transfer = case.definition.family == "transfer"
        settings = (
            (MeasurementSettings("fp32", "O1", "hot"),) if is_transfer else tuple(_all_settings(benchmark, case.cold))
        )
        result.append(CaseGroup(case.name, case.to_plain() | {"scale": benchmark.scale}, settings))
    return tuple(result)


def _all_settings(benchmark: BenchmarkRequest, cold: bool) -> Iterator[MeasurementSettings]:
    regimes = [r for r in benchmark.regimes if r == "hot" or cold] or ["hot"]
    for precision in benchmark.precisions:
        for level in benchmark.levels:
            for regime in regimes:
                yield from (
                    MeasurementSettings(precision, level, regime, name)
                    for name in dict.fromkeys(benchmark.kernels or ("",))
                )


def _user(name: str, mode: str) -> Data:
    return {"case": f"user/{name}/{mode}", "workload": name, "family": "model", "mode": mode, "about": "a user's model",
            "sizes": {}, "flops": None, "item": "sample", "items": None, "scale": "full"}  # fmt: skip
