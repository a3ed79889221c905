"""Which job is served first, as a fleet file says it: a policy by its name, ours or one that is installed."""

from importlib.metadata import entry_points
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, model_validator

from cluster.errors import UserError, nearest
from cluster.validation_errors import prefix_field

GROUP = "polyfleet.policies"
"""Of entry points: NAME = module:function, as docs/guides/policies.md tells."""

OURS = ("finish_time", "priority", "fifo", "max_min_fairness", "makespan", "cost")


def names() -> tuple[str, ...]:
    """All that a fleet file may say."""
    return (*OURS, *sorted({found.name for found in entry_points(group=GROUP)} - {*OURS}))


def _known(name: str) -> str:
    if name not in (known := names()):
        raise UserError(f"no policy is called {name!r}", nearest(name, known))
    return name


class PolicySpec(BaseModel, extra="forbid", frozen=True):
    """Who is served first among jobs of one priority."""

    name: Annotated[str, AfterValidator(lambda word: prefix_field(_known, word))] = Field(
        default=OURS[0], description=f"{', '.join(OURS)}, or one that is installed"
    )
    every_s: Annotated[float, Field(ge=1, le=3600, allow_inf_nan=False)] = Field(
        default=60.0, description="How often jobs may be stopped or moved for one of the same priority, in seconds"
    )
    ageing_s: Annotated[float, Field(ge=0, le=30 * 86_400, allow_inf_nan=False)] = Field(
        default=0.0, description="Each so many seconds of waiting raise a job's priority by one; 0: never"
    )
    explore_device_s: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = Field(
        default=3600.0,
        description="So many device-seconds the jobs of a workload run on a kind of device it was never measured on, "
        "before kinds on which it was",
    )

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, data: Any) -> Any:
        return {"name": data} if isinstance(data, str) else data
