"""The fleet's last reported devices, to check jobs that are submitted while no fleet is up.

The controller updates them; they are in a file in the server's home, which survives the server.
"""

import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cluster.errors import UserError
from cluster.paths import write_private
from cluster.serialization import from_plain, to_plain
from orchestrator.core.model import Devices

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inventory:
    """Devices, with all of them free, as of `seen_s` (seconds since the epoch).

    `heard_s`: last contact of each node, written when the fleet stops or the server ends.
    """

    seen_s: float
    devices: tuple[Devices, ...]
    heard_s: dict[str, float] = field(default_factory=dict)

    @property
    def reported_at(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.seen_s))


class LastInventory:
    """The last inventory and its file.

    Thread-safe. `newest`: None until a fleet was up in this home.
    """

    def __init__(self, path: Path):
        self._path = path
        self._lock = threading.Lock()
        self.newest = _read(path)

    def update(self, devices: tuple[Devices, ...]) -> None:
        """Update the inventory, and write it if it changed.

        A fleet without nodes is ignored: it is still starting.
        """
        if not devices:
            return
        now = tuple(replace(d, free=(), schedulable=True, reason="") for d in sorted(devices, key=lambda d: d.id))
        with self._lock:
            if self.newest is not None and self.newest.devices == now:
                return
            last_contact_s = self.newest.heard_s if self.newest else {}
            self._write(Inventory(time.time(), now, last_contact_s))

    def set_last_contacts(self, last_contact_s: Mapping[str, float]) -> None:
        """Store the last contact of nodes, when the server loses them or ends."""
        with self._lock:
            if last_contact_s and self.newest is not None:
                self._write(replace(self.newest, heard_s={**self.newest.heard_s, **last_contact_s}))

    def last_contact_s(self, node: str) -> float:
        """Last contact of a node before the server lost it, seconds since the epoch; 0 if unknown."""
        return self.newest.heard_s.get(node, 0.0) if self.newest else 0.0

    def _write(self, newest: Inventory) -> None:
        self.newest = newest
        try:
            write_private(self._path, json.dumps(to_plain(newest)))
        except OSError as e:  # the disk may be full: the next server then has an older inventory
            log.warning("%s cannot be written: %s", self._path, e.strerror or e)


def _read(path: Path) -> Inventory | None:
    try:
        data: Any = json.loads(path.read_text())
        return from_plain(Inventory, data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, UserError) as e:
        log.warning("%s cannot be read and will be replaced when a fleet is up: %s", path, e)
        return None
