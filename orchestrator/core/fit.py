"""Former name of `orchestrator.core.plan.options.fit`."""

from cluster.former_names import forward

__getattr__ = forward(__name__, "orchestrator.core.plan.options.fit", {"refusal": "refusal_reason"})
