"""What the fleet file says about who is served first."""

from collections.abc import Mapping
from dataclasses import dataclass, field

EXPLORE_DEVICE_S = 3600.0

HIGHEST = 1000
"""Priority; no job ages beyond it."""


@dataclass(frozen=True, slots=True)
class Policy:
    """`name` is one of planner.policies.POLICIES, or of what is installed. `every_s`: how often equals may be stopped
    or moved. `ageing_s`: a job that waits counts one priority more after each such time; 0: it does not.
    `explore_device_s`: so many device-seconds jobs of a workload run on a kind it was never measured on, before kinds
    on which it was.
    """

    name: str = "finish_time"
    every_s: float = 60.0
    ageing_s: float = 0.0
    explore_device_s: float = EXPLORE_DEVICE_S


@dataclass(frozen=True, slots=True)
class Project:
    """`quota`: so many devices by pattern of kinds. `borrow`: it may have more of what nobody else wants."""

    quota: Mapping[str, int] = field(default_factory=dict)
    borrow: bool = False
