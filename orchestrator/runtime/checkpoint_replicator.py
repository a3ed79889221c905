"""A copy of a checkpoint on another machine: made from node to node, proved there, and older copies removed."""

import logging
import time
from pathlib import PurePosixPath

from cluster.checkpoint_location import CheckpointLocation
from cluster.errors import PolyfleetError
from orchestrator.checkpoints import CheckpointService
from orchestrator.core.commands import Replicate
from orchestrator.core.messages import Replicated

log = logging.getLogger(__name__)

HOLD_EVERY_S = 30.0


class Replicator:
    """`checkpoints` carries every byte; it raises where one does not arrive as it was saved."""

    def __init__(self, checkpoints: CheckpointService):
        self._checkpoints = checkpoints

    def replicate(self, asked: Replicate) -> Replicated:
        name = PurePosixPath(asked.path).name
        path = f"{asked.job}/{name}"
        try:
            self._copy(asked, path)
        except PolyfleetError as e:
            return Replicated(asked.job, asked.step, asked.node, error=e.message)
        try:
            self._checkpoints.keep_newest(asked.node, asked.job, name, asked.keep)
        except PolyfleetError as e:  # the next copy removes what stayed
            log.warning("older copies of %s stay on %s: %s", asked.job, asked.node, e)
        return Replicated(asked.job, asked.step, asked.node, path)

    def _copy(self, asked: Replicate, path: str) -> None:
        """Its attempt saves newer ones meanwhile, and removes none that is held."""
        source = asked.reader, CheckpointLocation(asked.pool, asked.path)
        held_s = float("-inf")

        def hold(_done: int = 0, _total: int = 0) -> None:
            nonlocal held_s
            if time.monotonic() - held_s > HOLD_EVERY_S:
                held_s = time.monotonic()
                self._checkpoints.hold(*source)

        hold()
        self._checkpoints.move(source, asked.node, path, hold)
