"""States with a time limit: no flag may outlive its reason, and lost requests must be repeated."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from orchestrator.core.attempt.stop_modes import is_broken
from orchestrator.core.controller.attempts import AttemptState, LiveAttempt
from orchestrator.core.controller.draft import Control
from orchestrator.core.fleet import leaked_devices
from orchestrator.core.states import TERMINAL
from orchestrator.core.timing import LEASE_MARGIN_S, NODE_SILENT_S, RELEASE_LATE_S

if TYPE_CHECKING:
    from tests.simulator.world import Simulation

MAX_FENCED_S = 30.0
"""Limit for a fence above a current attempt, whose ranks cannot save in that time."""
MAX_EXPLAINED_S = 10.0
MAX_UNREPORTED_S = LEASE_MARGIN_S + RELEASE_LATE_S + 5.0
Key = tuple[str, str, int]


class TimeLimits:
    """Limits, checked every few seconds.

    Times restart while the server cannot act, and with each new server.
    """

    def __init__(self, world: "Simulation"):
        self.world = world
        self._since_s: dict[Key, float] = {}
        self._life = 0

    def check(self) -> None:
        """Check all limits. Raises Broken."""
        world, control = self.world, self.world.server.control
        current = {key: (limit_s, problem) for key, limit_s, problem in self._find(control)} if self._can_act() else {}
        if world.server.life != self._life:  # a restart between two checks; the new server measures from its own start
            self._life, self._since_s = world.server.life, {}
        self._since_s = {key: self._since_s.get(key, world.now_s) for key in current}
        for key, (limit_s, problem) in current.items():
            if world.now_s - self._since_s[key] > limit_s:
                world.checks.broken(key[0], key[1], f"{problem} for more than {limit_s:.0f} s")

    def _can_act(self) -> bool:
        server, ray = self.world.server, self.world.ray
        is_awake = server.up and not server.frozen and server.now().s - server.control.ticked_s < 2.0
        return (
            is_awake
            and server.control.is_joined
            and not (ray.is_away or ray.fences_away or self.world.store.refuses_writes)
        )

    def _find(self, control: Control) -> Iterator[tuple[Key, float, str]]:
        reported = {leak.holder for leak in leaked_devices.list_leaks(control, self.world.server.now())}
        for attempt in control.attempts.values():
            job = control.records[attempt.job].job
            if attempt.state is AttemptState.LAUNCHING:
                continue
            if attempt.raised_fence is None and self.world.ray.highest_fence(attempt.job) > attempt.epoch:
                yield ("R5", attempt.job, attempt.epoch), MAX_FENCED_S, f"a fence is above its attempt {attempt.epoch}"
            if attempt.cut_off is not None and attempt.cut_off.until_s is None and self._is_reached(control, attempt):
                yield (
                    ("R6", attempt.job, attempt.epoch),
                    MAX_EXPLAINED_S,
                    f"{attempt.cut_off.reason!r} explains its failures",
                )
            if job.state in TERMINAL and attempt.key not in reported:
                limit_s = job.recovery.lease_s + MAX_UNREPORTED_S
                yield (
                    ("R7", attempt.job, attempt.epoch),
                    limit_s,
                    f"its attempt {attempt.epoch} keeps running unreported",
                )

    def _is_reached(self, control: Control, attempt: LiveAttempt) -> bool:
        """Whether the attempt's nodes respond and have it."""
        if attempt.superseded_reason or any(part.doubt or is_broken(part) for part in attempt.parts):
            return False
        now_s, nodes = self.world.server.now().s, (control.nodes.get(part.node) for part in attempt.parts)
        return all(
            node is not None and not node.lost_reason and node.silent_s(now_s) < NODE_SILENT_S / 2 for node in nodes
        )
