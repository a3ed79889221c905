"""Prepare a script's own checkpoint for its next attempt; its files are on the node already."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from orchestrator.core.controller.commands import Launch
from orchestrator.runtime.agents.agents import Agents
from workers.protocol.messages import Order, ScriptCheckpoint

COPY_S = 3600.0
"""Maximum seconds for reading and copying a checkpoint on its node."""


@dataclass(frozen=True, slots=True)
class ScriptResume:
    """Result of `prepare_script_checkpoint`.

    `checkpoint`: None if there is no script checkpoint. `text`: the result of the search, for the record.
    """

    checkpoint: ScriptCheckpoint | None = None
    text: str = ""

    def add_to(self, order: Order) -> Order:
        return replace(order, arguments=self.checkpoint.to_plain()) if self.checkpoint else order


def prepare_script_checkpoint(agents: Agents, launch: Launch, set_activity: Callable[[str], None]) -> ScriptResume:
    """Have the attempt's first node read the script's checkpoint.

    Raises FleetError if the node cannot do it now.

    In a gang without shared storage only the first node's checkpoint is read; the other nodes have the matching parts.
    """
    first = launch.orders[0] if launch.orders else None
    script = ScriptCheckpoint.of(first.task, first.arguments) if first else None
    if first is None or script is None or not any(attempt.started for attempt in launch.previous_attempts):
        return ScriptResume()
    set_activity(f"reads its checkpoint {script.path}")
    arguments = (script.path, script.format, first.backend, len(first.devices))
    reply = agents.call(
        launch.nodes[0], "copy_script_checkpoint", launch.job, launch.epoch, *arguments, timeout_s=COPY_S
    )
    return ScriptResume(script._replace(found=bool(reply["found"])), str(reply["text"]))
