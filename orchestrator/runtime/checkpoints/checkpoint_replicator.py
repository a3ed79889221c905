"""Copy a checkpoint to another machine, from node to node; verify it, then remove older copies."""

import logging
import time
from pathlib import PurePosixPath

from cluster.errors import PolyfleetError
from cluster.input.checkpoint_location import CheckpointLocation
from orchestrator.core.controller.commands import Replicate
from orchestrator.core.controller.messages import Replicated
from orchestrator.runtime.checkpoints.checkpoints import CheckpointService

log = logging.getLogger(__name__)

HOLD_EVERY_S = 30.0


class Replicator:
    """Carries out Replicate commands.

    `checkpoints` copies the data, and raises if a copy does not match its source.
    """

    def __init__(self, checkpoints: CheckpointService):
        self._checkpoints = checkpoints

    def replicate(self, request: Replicate) -> Replicated:
        name = PurePosixPath(request.path).name
        path = f"{request.job}/{name}"
        try:
            self._copy(request, path)
        except PolyfleetError as e:
            return Replicated(request.job, request.step, request.node, error=e.message)
        try:
            self._checkpoints.keep_newest(request.node, request.job, name, request.keep)
        except PolyfleetError as e:  # the next copy removes them
            log.warning("older copies of %s were not removed from %s: %s", request.job, request.node, e)
        return Replicated(request.job, request.step, request.node, path)

    def _copy(self, request: Replicate, path: str) -> None:
        """Copy the checkpoint, and hold it until then, so that the running attempt does not remove it."""
        source = request.reader, CheckpointLocation(request.pool, request.path)
        held_s = float("-inf")

        def hold(_done: int = 0, _total: int = 0) -> None:
            nonlocal held_s
            if time.monotonic() - held_s > HOLD_EVERY_S:
                held_s = time.monotonic()
                self._checkpoints.protect(*source)

        hold()
        self._checkpoints.move(source, request.node, path, hold)
