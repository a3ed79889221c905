"""Which controller a node obeys: each has a number higher than those before it, and the newest heard of counts."""

import logging
import threading
from contextlib import suppress
from pathlib import Path

from cluster.errors import UserError
from cluster.paths import write_durably
from cluster.untrusted_files import UnreadableFile, read_bytes
from workers.attempt import reserved_files
from workers.errors import ControllerSuperseded
from workers.message_fields import is_count

LOG = logging.getLogger(__name__)
LONGEST_BYTES = 32


class ControllerGeneration:
    """The newest one, kept in the file `path` so that a restarted agent obeys no older one either."""

    def __init__(self, path: Path):
        self._path = path
        self._lock = threading.Lock()
        self._seen = self._saved = _read(path)
        with suppress(OSError):  # a full disk: then it is remembered for as long as this agent lives
            reserved_files.reserve_space(path, LONGEST_BYTES)

    @property
    def seen(self) -> int:
        return self._seen

    def admit(self, generation: int) -> None:
        """Raises ControllerSuperseded for a controller older than one that this node has heard of."""
        if not is_count(generation):
            raise UserError(f"{str(generation)[:40]!r} is not a controller's generation", "it is a whole number")
        with self._lock:
            if generation < self._seen:
                raise ControllerSuperseded(generation, self._seen)
            self._seen = generation
            if generation > self._saved:
                self._save(generation)

    def _save(self, generation: int) -> None:
        """A disk that fails must not keep a new controller from its nodes: it is saved with the next call."""
        try:
            reserved_files.replace_or_use_reserve(self._path, f"{generation}\n", durable=True)
            write_durably(self._path.parent)
            self._saved = generation
            reserved_files.reserve_space(self._path, LONGEST_BYTES)
        except OSError as e:
            LOG.error("that controller %d has taken over cannot be written down: %s", generation, e)


def _read(path: Path) -> int:
    """0 without a record of ours."""
    try:
        return int(read_bytes(path, LONGEST_BYTES))
    except (FileNotFoundError, UnreadableFile, ValueError):
        return 0
