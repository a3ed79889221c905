"""Former name of `orchestrator.core.controller.nodes`."""

from cluster.former_names import forward

__getattr__ = forward(__name__, "orchestrator.core.controller.nodes", {"groups": "device_groups"})
