"""Hosts that were away when this home's fleet was taken down: what runs there is stopped when they are reached next."""

import json

from cluster.errors import UserError
from cluster.file_lock import exclusive
from cluster.fleet_record import HostRecord
from cluster.paths import home, private_dir, write_private
from cluster.serialization import from_plain, to_plain

FILE = "hosts-to-leave.json"


def hosts() -> list[HostRecord]:
    """Raises UserError for a file that cannot be read."""
    path = home() / FILE
    try:
        return [from_plain(HostRecord, one) for one in json.loads(path.read_text())]
    except FileNotFoundError:
        return []
    except (ValueError, UserError, TypeError) as e:
        raise UserError(
            f"{path} is damaged: {e}", "stop what runs on your hosts by hand, then remove that file"
        ) from None


def remember(host: HostRecord) -> None:
    _write(host, True)


def forget(host: HostRecord) -> None:
    _write(host, False)


def _write(host: HostRecord, away: bool) -> None:
    """Several threads do so at once."""
    private_dir(home())
    with exclusive(home() / f"{FILE}.lock", lambda: None):
        before = hosts()
        others = [one for one in before if (one.name, one.home) != (host.name, host.home)]
        after = [*others, host] if away else others
        if after != before:
            write_private(home() / FILE, json.dumps([to_plain(one) for one in after], indent=1))
