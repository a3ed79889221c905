"""Former name of `cluster.types`."""

from cluster.former_names import forward

__getattr__ = forward(__name__, "cluster.types")
