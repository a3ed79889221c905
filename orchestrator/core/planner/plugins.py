"""Policies from outside this package: found by the server as entry points, and not trusted to work."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np

from orchestrator.core.planner.planner_jobs import Floats, Work
from orchestrator.core.planner.policies import Seen

Plugin = Callable[[Seen], Floats]
MOST_TOLD = 300
COLUMNS = tuple(column.name for column in fields(Work))
KNOWN: dict[str, Plugin] = {}
"""By name; filled once, before anything is planned."""


class Fault(Exception):
    """What an installed policy did wrong, in a sentence."""


def worth(name: str, seen: Seen) -> Floats:
    """(options, jobs) as the policies of policies.py give it. Raises Fault."""
    try:
        given = KNOWN[name](_read_only(seen))
        found = np.asarray(given, np.float64)
    except (Exception, SystemExit) as e:
        raise Fault(f"policy {name!r} raised {type(e).__name__}: {' '.join(str(e).split())[:MOST_TOLD]}") from e
    if found.shape != seen.work.remaining_s.shape:
        raise Fault(f"policy {name!r} gave an array of shape {found.shape}, not {seen.work.remaining_s.shape}")
    possible = found[seen.work.possible]
    if not np.isfinite(possible).all() or (possible < 0).any():
        raise Fault(f"policy {name!r} gave values that are not finite or below 0 for options that jobs have")
    if possible.size and not possible.any():
        raise Fault(f"policy {name!r} gave 0 for every option that jobs have")
    return np.where(seen.work.possible, found, 0.0)


def _read_only(seen: Seen) -> Seen:
    """It may not change what the planner goes on with."""
    matching = replace(seen.matching, price=_view(seen.matching.price))
    columns = {name: _view(part) for name in COLUMNS if isinstance(part := getattr(seen.work, name), np.ndarray)}
    return replace(
        seen,
        work=replace(seen.work, machines=None, **columns),
        matching=matching,
        cost=_view(seen.cost),
        least=_view(seen.least),
    )


def _view(array: Any) -> Any:
    view = array.view()
    view.flags.writeable = False
    return view
