"""Former name of `workers.devices.discovery.vendors.nvidia`."""

from cluster.former_names import forward

__getattr__ = forward(__name__, "workers.devices.discovery.vendors.nvidia", {"ask": "query_nvml"})
