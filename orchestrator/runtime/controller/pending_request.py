"""Requests to the controller whose callers wait until the result is stored."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.errors import Conflict, FleetError, NotFound, PolyfleetError
from orchestrator.core.controller.commands import Reject
from orchestrator.core.controller.messages import Message

RESULT_S = 5.0


class ControllerBusy(FleetError):
    """The controller did not process the request in time."""

    retry_after_s = 2


@dataclass(eq=False)
class PendingRequest:
    """A message whose sender waits until all events that follow from it are stored."""

    message: Message
    done: threading.Event = field(default_factory=threading.Event)
    error: PolyfleetError | None = None

    def finish(self, error: PolyfleetError | None = None) -> None:
        self.error = error
        self.done.set()

    def set_refusal(self, refuse: Reject | None) -> None:
        """Record the controller's refusal, if any, until all events of this cycle are stored."""
        if refuse is not None:
            self.error = (NotFound if refuse.is_missing else Conflict)(refuse.message, refuse.remedy)

    def wait(self, timeout_s: float, current_activity: Callable[[], str]) -> None:
        """Wait until the effect is durable. Raises NotFound or Conflict if refused, FleetError, ControllerBusy."""
        if not self.done.wait(timeout_s):
            raise ControllerBusy(
                f"the server did not process the request within {timeout_s:.0f} s: it is {current_activity()}",
                "it may still be carried out; repeating the request is safe",
            )
        if self.error is not None:
            raise self.error
