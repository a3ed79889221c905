"""What somebody waits for the controller to do."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.errors import Conflict, FleetError, NotFound, PolyfleetError
from orchestrator.core.commands import Refuse
from orchestrator.core.messages import Message

ANSWER_S = 5.0


class Busy(FleetError):
    """The controller did not get to it in time."""

    retry_after_s = 2


@dataclass(eq=False)
class Ask:
    """A message that somebody waits for: until what follows from it is stored."""

    message: Message
    done: threading.Event = field(default_factory=threading.Event)
    error: PolyfleetError | None = None

    def answer(self, error: PolyfleetError | None = None) -> None:
        self.error = error
        self.done.set()

    def refused(self, refuse: Refuse | None) -> None:
        """Keep what the controller said to it, None being nothing, until all of its turn is stored."""
        if refuse is not None:
            self.error = (NotFound if refuse.absent else Conflict)(refuse.message, refuse.remedy)

    def wait(self, timeout_s: float, doing: Callable[[], str]) -> None:
        """Until it is durable. Raises NotFound or Conflict as the controller refused it, FleetError, Busy."""
        if not self.done.wait(timeout_s):
            raise Busy(
                f"the server did not process the request within {timeout_s:.0f} s: it is {doing()}",
                "it may still be carried out; repeating the request is safe",
            )
        if self.error is not None:
            raise self.error
