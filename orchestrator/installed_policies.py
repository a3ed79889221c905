"""Register policies of other distributions with the planner: entry points of group `polyfleet.policies`."""

from functools import cache
from importlib.metadata import entry_points
from typing import NoReturn

from cluster.policies import GROUP, OURS
from orchestrator.core.planner.plugins import KNOWN, Plugin
from orchestrator.core.planner.policies import Seen


@cache
def load() -> None:
    """Load all policies once. One that cannot be loaded is registered too, and raises the reason when it is used."""
    for entry in entry_points(group=GROUP):
        if entry.name in OURS:
            continue
        try:
            KNOWN[entry.name] = entry.load()
        except (Exception, SystemExit) as e:
            KNOWN[entry.name] = _failing(f"it cannot be loaded: {type(e).__name__}: {e}")


def expect(name: str) -> None:
    """Make sure that the policy of a running fleet is registered, even if it is no longer installed."""
    load()
    if name not in OURS and name not in KNOWN:
        KNOWN[name] = _failing("it is not installed where the server runs")


class NotUsableError(Exception):
    pass


def _failing(reason: str) -> Plugin:
    def policy(_seen: Seen) -> NoReturn:
        raise NotUsableError(reason)

    return policy
