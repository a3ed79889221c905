"""Installed policies: the server finds them as entry points. Their results are checked."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np

from orchestrator.core.plan.arrays.planner_jobs import Floats, Work
from orchestrator.core.plan.policies.policy_input import PolicyInput

Plugin = Callable[[PolicyInput], Floats]
MAX_MESSAGE_LENGTH = 300
WORK_FIELDS = tuple(field.name for field in fields(Work))
INSTALLED: dict[str, Plugin] = {}
"""Installed policies by name, filled once before the first plan."""


class PolicyError(Exception):
    """Error of an installed policy, as a sentence."""


def call_policy(name: str, inputs: PolicyInput) -> Floats:
    """Call an installed policy. Return (options, jobs) like the policies of priced_policies.py. Raises PolicyError."""
    try:
        result = INSTALLED[name](_read_only(inputs))
        values = np.asarray(result, np.float64)
    except (Exception, SystemExit) as e:
        raise PolicyError(
            f"policy {name!r} raised {type(e).__name__}: {' '.join(str(e).split())[:MAX_MESSAGE_LENGTH]}"
        ) from e
    if values.shape != inputs.work.remaining_s.shape:
        raise PolicyError(
            f"policy {name!r} returned an array of shape {values.shape}, not {inputs.work.remaining_s.shape}"
        )
    possible = values[inputs.work.possible]
    if not np.isfinite(possible).all() or (possible < 0).any():
        raise PolicyError(f"policy {name!r} returned values that are not finite or below 0 for options that jobs have")
    if possible.size and not possible.any():
        raise PolicyError(f"policy {name!r} returned 0 for every option that jobs have")
    return np.where(inputs.work.possible, values, 0.0)


def _read_only(inputs: PolicyInput) -> PolicyInput:
    """Return read-only views, so that a policy cannot change the planner's arrays."""
    matching = replace(inputs.matching, price=_view(inputs.matching.price))
    arrays = {name: _view(part) for name in WORK_FIELDS if isinstance(part := getattr(inputs.work, name), np.ndarray)}
    return replace(
        inputs,
        work=replace(inputs.work, machines=None, **arrays),
        matching=matching,
        cost=_view(inputs.cost),
        least=_view(inputs.least),
    )


def _view(array: Any) -> Any:
    view = array.view()
    view.flags.writeable = False
    return view
