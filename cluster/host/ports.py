"""Find which users listen on a port of this machine, before anything secret is sent to it."""

import os
import socket
import sys
from pathlib import Path

from cluster.errors import FleetError

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTEN = "0A"
LOOPBACK_LISTENERS = frozenset({"127.0.0.1", "0.0.0.0", "::1", "::", "::ffff:127.0.0.1"})  # noqa: S104 - these accept connections to loopback too
LOCAL, STATE, UID = 1, 3, 7
"""Columns of the tables. Source: Linux, Documentation/networking/proc_net_tcp.rst."""


def listener_uids(port: int) -> frozenset[int] | None:
    """Return the user ids of listeners on `port` that a connection to loopback may reach.

    None if the system does not provide the table.
    """
    if not TABLES[0].exists():
        return None
    rows = [line.split() for table in TABLES if table.exists() for line in table.read_text().splitlines()[1:]]
    return frozenset(int(r[UID]) for r in rows if r[STATE] == LISTEN and _is_here(r[LOCAL], port))


def check_listener(address: str) -> None:
    """Raise FleetError if another user listens at `address`, which is HOST:PORT of this machine.

    That user must not receive what we send, above all the token.
    """
    port = port_of(address)
    uids = listener_uids(port)
    if uids and uids != {os.geteuid()}:
        other_users = ", ".join(str(uid) for uid in sorted(uids - {os.geteuid()}))
        raise FleetError(
            f"port {port} is in use by another user (uid {other_users}), not by us; nothing was sent there",
            "run `polyfleet down`, then `polyfleet up`: it chooses another port",
        )


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def _is_here(local: str, port: int) -> bool:
    host, _, number = local.partition(":")
    return int(number, 16) == port and _address(host) in LOOPBACK_LISTENERS


def _address(text: str) -> str:
    """Parse an address of the tables such as 0100007F: 32-bit words in the machine's byte order."""
    words = [bytes.fromhex(text[i : i + 8]) for i in range(0, len(text), 8)]
    raw = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
