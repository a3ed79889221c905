"""The built-in policies by name.

A priced policy is a function that returns the value of a second of each option, (options, jobs) in any one unit. It
reads `PolicyInput`: the work and the prices of its devices. Prices (plan/arrays/prices.py) divide the devices among
jobs by these values, so only ratios count.
"""

from orchestrator.core.plan.policies.cost import cost
from orchestrator.core.plan.policies.finish_time import finish_time
from orchestrator.core.plan.policies.makespan import makespan
from orchestrator.core.plan.policies.max_min_fairness import max_min_fairness
from orchestrator.core.plan.policies.policy_input import Policy

PRICED: dict[str, Policy] = {
    "finish_time": finish_time,
    "max_min_fairness": max_min_fairness,
    "makespan": makespan,
    "cost": cost,
}
ORDER_POLICIES = ("fifo", "priority")
POLICIES = (*ORDER_POLICIES, *PRICED)
DEFAULT = "finish_time"
