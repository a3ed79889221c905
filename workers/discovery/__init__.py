"""Former name of `workers.devices.discovery`."""

from cluster.former_names import forward

__getattr__ = forward(__name__, "workers.devices.discovery")
