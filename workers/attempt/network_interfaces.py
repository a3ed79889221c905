"""On which of a machine's network interfaces ranks talk to each other: the one that has the address of the node.

Left to themselves, libraries take the interface that the machine's name leads to, or the first one. On a machine with
several, that may be one which the other nodes do not reach, and the ranks wait for each other until they are stopped.
"""

import ipaddress
import sys
from collections.abc import Iterable, Mapping

from cluster.catalogue import vendor
from workers.messages import Order

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def of_address(address: str, addresses: Mapping[str, Iterable[str]]) -> str:
    """The interface that has `address`, among those of the machine with their addresses; "" where none has it, as
    behind a translation of addresses.
    """
    wanted = _parsed(address)
    found = [name for name, its in addresses.items() if wanted is not None and wanted in map(_parsed, its)]
    return min(found, default="")


def of_this_machine(address: str) -> str:
    import psutil

    here = psutil.net_if_addrs()
    return of_address(address, {name: [row.address for row in rows] for name, rows in here.items()})


def variables(order: Order, interface: str) -> dict[str, str]:
    """What names it to torch's gloo, to NCCL and RCCL, and to the libraries of the order's own vendor.

    NCCL takes a name for the beginning of one unless a `=` stands before it: `eth1` would be `eth10`, too.
    Source: NCCL's user guide, environment variables.
    """
    if order.master_address.startswith("127."):
        return {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
    if not interface:
        return {}
    common = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return common | dict.fromkeys(vendor(order.backend).interface_variables, interface)


def _parsed(address: str) -> "ipaddress.IPv4Address | ipaddress.IPv6Address | None":
    """Without the zone of an IPv6 address. Other kinds of addresses, as of cards, are none."""
    try:
        return ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
