"""Hosts that could not be reached by `polyfleet down`: their processes are stopped later."""

import json

from cluster.errors import UserError
from cluster.fleet.fleet_record import HostRecord
from cluster.host.file_lock import exclusive
from cluster.paths import home, private_dir, write_private
from cluster.serialization import from_plain, to_plain

FILE = "hosts-to-leave.json"


def hosts() -> list[HostRecord]:
    """Return the hosts that still have to be stopped. Raises UserError if the file cannot be read."""
    path = home() / FILE
    try:
        return [from_plain(HostRecord, entry) for entry in json.loads(path.read_text())]
    except FileNotFoundError:
        return []
    except (ValueError, UserError, TypeError) as e:
        raise UserError(
            f"{path} is damaged: {e}", "stop Polyfleet's processes on your hosts by hand, then remove that file"
        ) from None


def add(host: HostRecord) -> None:
    _write(host, True)


def remove(host: HostRecord) -> None:
    _write(host, False)


def _write(host: HostRecord, away: bool) -> None:
    """Add or remove a host. Thread-safe."""
    private_dir(home())
    with exclusive(home() / f"{FILE}.lock", lambda: None):
        stored = hosts()
        other_hosts = [entry for entry in stored if (entry.name, entry.home) != (host.name, host.home)]
        after = [*other_hosts, host] if away else other_hosts
        if after != stored:
            write_private(home() / FILE, json.dumps([to_plain(entry) for entry in after], indent=1))
