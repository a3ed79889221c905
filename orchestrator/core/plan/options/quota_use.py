"""Which attempts of a project are within its quota. The others borrow."""

from bisect import insort
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """Attempt that holds `devices`, by pattern of a quota, in the order in which attempts are within the quota.

    Those that may not be stopped come first, because they could not return what they borrow, then those of higher
    priority, then those submitted earlier.
    """

    preemptible: bool
    negative_priority: int
    order: int
    job: str
    devices: Mapping[str, int] = field(default_factory=dict, compare=False)


class QuotaUse:
    """Use of the quota of one project, `limits` by pattern, by attempts that are not stopping.

    An attempt is within the quota if it fits into what those before it leave; else it borrows and leaves that to the
    next ones. So neither borrowers nor later attempts decide which attempts are within the quota.
    """

    def __init__(self, limits: Mapping[str, int]):
        self._limits, self._holders = limits, list[Holder]()
        self._within: list[Holder] | None = None
        self._counted: dict[tuple[str, int], int] = {}

    def add(self, holder: Holder) -> None:
        insort(self._holders, holder)
        self._within = None

    def remove(self, job: str) -> None:
        self._holders = [holder for holder in self._holders if holder.job != job]
        self._within = None

    def borrowers(self) -> set[str]:
        """Return the jobs of attempts beyond the quota."""
        return {holder.job for holder in self._holders} - {holder.job for holder in self._divided()}

    def counted(self, pattern: str, priority: int) -> int:
        """Return the devices within the quota whose attempts do not become borrowers for a job of `priority`."""
        within, key = self._divided(), (pattern, priority)
        if key not in self._counted:
            ahead = (holder for holder in within if not holder.preemptible or -holder.negative_priority >= priority)
            self._counted[key] = sum(holder.devices.get(pattern, 0) for holder in ahead)
        return self._counted[key]

    def _divided(self) -> list[Holder]:
        """Return the attempts within the quota."""
        if self._within is None:
            left, self._within, self._counted = Counter(self._limits), [], {}
            for holder in self._holders:
                if all(devices <= left[pattern] for pattern, devices in holder.devices.items()):
                    left.subtract(holder.devices)
                    self._within.append(holder)
        return self._within
