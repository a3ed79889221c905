"""The devices that the fleet had when it was seen last: what is submitted while no fleet is up is checked against them.

The controller tells what it sees; the file in the home outlives the server.
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
    """`devices` with nothing held, as they were at `seen_s` (seconds since the epoch). `heard_s` has when each node
    answered last, as far as the fleet is down or the server has ended.
    """

    seen_s: float
    devices: tuple[Devices, ...]
    heard_s: dict[str, float] = field(default_factory=dict)

    @property
    def seen_at(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.seen_s))


class KnownDevices:
    """Safe to use from several threads. `newest` is None until a fleet was seen in this home."""

    def __init__(self, path: Path):
        self._path = path
        self._lock = threading.Lock()
        self.newest = _read(path)

    def look(self, devices: tuple[Devices, ...]) -> None:
        """What there is now; written down when it differs from what was there. A fleet without nodes is not one yet."""
        if not devices:
            return
        now = tuple(replace(d, free=(), schedulable=True, reason="") for d in sorted(devices, key=lambda d: d.id))
        with self._lock:
            if self.newest is not None and self.newest.devices == now:
                return
            heard_s = self.newest.heard_s if self.newest else {}
            self._write(Inventory(time.time(), now, heard_s))

    def hear(self, heard_s: Mapping[str, float]) -> None:
        """When nodes answered last: nobody hears them from now on."""
        with self._lock:
            if heard_s and self.newest is not None:
                self._write(replace(self.newest, heard_s={**self.newest.heard_s, **heard_s}))

    def heard_s(self, node: str) -> float:
        """When it answered last, seconds since the epoch, before nobody heard it any more; 0 where nobody knows."""
        return self.newest.heard_s.get(node, 0.0) if self.newest else 0.0

    def _write(self, newest: Inventory) -> None:
        self.newest = newest
        try:
            write_private(self._path, json.dumps(to_plain(newest)))
        except OSError as e:  # a full disk: the next server knows an older inventory
            log.warning("%s cannot be written: %s", self._path, e.strerror or e)


def _read(path: Path) -> Inventory | None:
    try:
        data: Any = json.loads(path.read_text())
        return from_plain(Inventory, data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, UserError) as e:
        log.warning("%s cannot be read and is written anew with the next fleet: %s", path, e)
        return None
