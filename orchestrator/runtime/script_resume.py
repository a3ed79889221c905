"""What a script resumes from: its files are where its next attempt runs, and the node there looks at its checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from orchestrator.core.commands import Launch
from orchestrator.runtime.agents import Agents
from workers.messages import Order, ScriptCheckpoint

COPY_S = 3600.0
"""The longest that reading and copying a checkpoint on its node may take."""


@dataclass(frozen=True, slots=True)
class HandedOn:
    """`asked` is None for a job without a checkpoint of this kind. `text` says what became of it, for its record."""

    asked: ScriptCheckpoint | None = None
    text: str = ""

    def given_to(self, order: Order) -> Order:
        return replace(order, arguments=self.asked.to_plain()) if self.asked else order


def hand_on(agents: Agents, asked: Launch, tell: Callable[[str], None]) -> HandedOn:
    """Of a gang on nodes without a common storage only the first node's is looked at: the others hold what belongs to
    it. Raises FleetError where that node cannot do it now.
    """
    first = asked.orders[0] if asked.orders else None
    script = ScriptCheckpoint.of(first.task, first.arguments) if first else None
    if first is None or script is None or not any(one.started for one in asked.ran):
        return HandedOn()
    tell(f"looks at its checkpoint {script.path}")
    where = (script.path, script.format, first.backend, len(first.devices))
    told = agents.call(asked.nodes[0], "hand_on_checkpoint", asked.job, asked.epoch, *where, timeout_s=COPY_S)
    return HandedOn(script._replace(found=bool(told["found"])), str(told["text"]))
