"""Generation of the controller that a node obeys.

Each controller has a higher number than those before it.
"""

import logging
import threading
from contextlib import suppress
from pathlib import Path

from cluster.errors import UserError
from cluster.input.untrusted_files import UnreadableFile, read_bytes
from cluster.paths import write_durably
from workers.errors import ControllerSuperseded
from workers.protocol import reserved_files
from workers.protocol.message_fields import is_count

LOG = logging.getLogger(__name__)
MAX_FILE_BYTES = 32


class ControllerGeneration:
    """The newest generation, stored in the file `path` so that a restarted agent refuses older ones, too."""

    def __init__(self, path: Path):
        self._path = path
        self._lock = threading.Lock()
        self._newest = self._saved = _read(path)
        with suppress(OSError):  # on a full disk only this agent remembers it, in memory
            reserved_files.reserve_space(path, MAX_FILE_BYTES)

    @property
    def newest(self) -> int:
        return self._newest

    def check_and_record(self, generation: int) -> None:
        """Check and record a controller's generation.

        Raises ControllerSuperseded for one older than the newest.
        """
        if not is_count(generation):
            raise UserError(
                f"{str(generation)[:40]!r} is not a controller's generation", "use an integer of at least 0"
            )
        with self._lock:
            if generation < self._newest:
                raise ControllerSuperseded(generation, self._newest)
            self._newest = generation
            if generation > self._saved:
                self._save(generation)

    def _save(self, generation: int) -> None:
        """Save a generation. A failing disk must not lock out a new controller: the next call tries again."""
        try:
            reserved_files.replace_or_use_reserve(self._path, f"{generation}\n", durable=True)
            write_durably(self._path.parent)
            self._saved = generation
            reserved_files.reserve_space(self._path, MAX_FILE_BYTES)
        except OSError as e:
            LOG.error("the generation %d of the new controller cannot be saved: %s", generation, e)


def _read(path: Path) -> int:
    """Read the saved generation; 0 if there is none."""
    try:
        return int(read_bytes(path, MAX_FILE_BYTES))
    except (FileNotFoundError, UnreadableFile, ValueError):
        return 0
