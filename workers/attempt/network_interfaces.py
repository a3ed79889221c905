"""Choose the network interface of the ranks: the one that has the node's address.

By default, libraries use the interface of the address that the host name resolves to, or the first one. On a machine
with several, other nodes may not reach that one, and the ranks wait for each other until they are stopped.
"""

import ipaddress
import sys
from collections.abc import Iterable, Mapping

from cluster.catalogue import vendor
from workers.protocol.messages import Order

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def interface_of_address(address: str, addresses: Mapping[str, Iterable[str]]) -> str:
    """Return the interface that has `address`; "" if none has it, as behind network address translation.

    `addresses`: addresses by interface.
    """
    target = _parse_address(address)
    matches = [
        name
        for name, interface_addresses in addresses.items()
        if target is not None and target in map(_parse_address, interface_addresses)
    ]
    return min(matches, default="")


def local_interface(address: str) -> str:
    """Return the interface of this machine that has `address`; "" if none has it."""
    import psutil

    interfaces = psutil.net_if_addrs()
    return interface_of_address(address, {name: [row.address for row in rows] for name, rows in interfaces.items()})


def variables(order: Order, interface: str) -> dict[str, str]:
    """Variables that name the interface to torch's gloo, NCCL, RCCL and the vendor's own libraries.

    NCCL matches a name as a prefix unless it starts with `=`: `eth1` would match `eth10`, too.
    Source: NCCL's user guide, environment variables.
    """
    if order.master_address.startswith("127."):
        return {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
    if not interface:
        return {}
    common = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return common | dict.fromkeys(vendor(order.backend).interface_variables, interface)


def _parse_address(address: str) -> "ipaddress.IPv4Address | ipaddress.IPv6Address | None":
    """Parse an address without its IPv6 zone; None for other kinds, such as MAC addresses."""
    try:
        return ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
