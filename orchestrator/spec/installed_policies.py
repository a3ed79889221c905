"""Register policies of other distributions with the planner: entry points of group `polyfleet.policies`."""

from functools import cache
from importlib.metadata import entry_points
from typing import NoReturn

from cluster.fleet.policies import BUILTIN, GROUP
from orchestrator.core.plan.policies.plugins import INSTALLED, Plugin
from orchestrator.core.plan.policies.policy_input import PolicyInput


@cache
def load() -> None:
    """Load all policies once. One that cannot be loaded is registered too, and raises the reason when it is used."""
    for entry in entry_points(group=GROUP):
        if entry.name in BUILTIN:
            continue
        try:
            INSTALLED[entry.name] = entry.load()
        except (Exception, SystemExit) as e:
            INSTALLED[entry.name] = _failing_policy(f"it cannot be loaded: {type(e).__name__}: {e}")


def register_expected(name: str) -> None:
    """Make sure that the policy of a running fleet is registered, even if it is no longer installed."""
    load()
    if name not in BUILTIN and name not in INSTALLED:
        INSTALLED[name] = _failing_policy("it is not installed where the server runs")


class NotUsableError(Exception):
    pass


def _failing_policy(reason: str) -> Plugin:
    def policy(_input: PolicyInput) -> NoReturn:
        raise NotUsableError(reason)

    return policy
