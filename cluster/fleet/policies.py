"""Scheduler of a fleet file: the name of a built-in or an installed policy, and its settings."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, model_validator

from cluster.errors import UserError, nearest
from cluster.input.validation_errors import WrongValueError, prefix_field

GROUP = "polyfleet.policies"
"""Entry-point group of installed policies, NAME = module:function; see docs/guides/policies.md."""

BUILTIN = ("finish_time", "priority", "fifo", "max_min_fairness", "makespan", "cost")


def names() -> tuple[str, ...]:
    """Return every policy name that a fleet file may use."""
    return (*BUILTIN, *sorted({entry.name for entry in entry_points(group=GROUP)} - {*BUILTIN}))


def _check_name(name: str) -> str:
    if name not in (valid := names()):
        raise UserError(f"unknown policy {name!r}", nearest(name, valid))
    return name


class SchedulerSpec(BaseModel, extra="forbid", frozen=True):
    """Policy that orders jobs of the same priority, and its settings."""

    policy: Annotated[str, AfterValidator(lambda name: prefix_field(_check_name, name))] = Field(
        default=BUILTIN[0], description=f"{', '.join(BUILTIN)}, or the name of an installed policy"
    )
    every_s: Annotated[float, Field(ge=1, le=3600, allow_inf_nan=False)] = Field(
        default=60.0,
        description="Seconds between decisions to stop or move jobs in favour of others of the same priority",
    )
    ageing_s: Annotated[float, Field(ge=0, le=30 * 86_400, allow_inf_nan=False)] = Field(
        default=0.0, description="Seconds of waiting that raise a job's priority by one (0: never)"
    )
    explore_device_s: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = Field(
        default=3600.0,
        description="Device-seconds that jobs of a workload run on a kind of device on which it was never measured, "
        "before kinds on which it was measured",
    )

    @model_validator(mode="before")
    @classmethod
    def _is_mapping(cls, data: Any) -> Any:
        if isinstance(data, str):
            raise WrongValueError(f"must be a mapping, got {data[:60]!r}", f"write {{policy: {data[:60]}}}")
        return data

    def settings(self) -> dict[str, Any]:
        """Return the policy's name and settings for the fleet's record, as fields of orchestrator/core/model.py."""
        return {"name": self.policy, **self.model_dump(mode="json", exclude={"policy"})}


def scheduler_data(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key `scheduler` of a fleet file for the settings in a fleet's record."""
    return {"policy" if name == "name" else str(name): value for name, value in settings.items()}


def removed_form_error(written: Any) -> WrongValueError:
    """Return the error for the former key `policy` of a fleet file, a name or a mapping, with what to write instead."""
    settings = {"policy": written} if isinstance(written, str) else {}
    if isinstance(written, dict):
        settings = scheduler_data(written)
    text = ", ".join(f"{name}: {value!s:.60}" for name, value in settings.items()) or f"policy: {BUILTIN[0]}"
    return WrongValueError("is now a field of `scheduler`", f"write scheduler: {{{text}}}", field="policy")
