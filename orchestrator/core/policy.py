"""Scheduling settings of the fleet file: policy and projects."""

from collections.abc import Mapping
from dataclasses import dataclass, field

EXPLORE_DEVICE_S = 3600.0

HIGHEST = 1000
"""Highest priority that a job can reach by waiting."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Scheduling policy.

    `name`: one of POLICIES in plan/policies/priced_policies.py, or an installed policy. `every_s`: interval of full
    decisions, in which jobs of equal priority may be stopped or moved. `ageing_s`: waiting time that raises a job's
    priority by one; 0: never. `explore_device_s`: device-seconds for which jobs of a workload may use an unmeasured
    kind before measured kinds come first.
    """

    name: str = "finish_time"
    every_s: float = 60.0
    ageing_s: float = 0.0
    explore_device_s: float = EXPLORE_DEVICE_S


@dataclass(frozen=True, slots=True)
class Project:
    """`quota`: number of devices by pattern of kinds. `borrow`: it may also use devices that no other job needs."""

    quota: Mapping[str, int] = field(default_factory=dict)
    borrow: bool = False
