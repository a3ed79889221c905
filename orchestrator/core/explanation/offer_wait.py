"""Earliest time at which running jobs will have freed enough devices for a job. Pure."""

from collections.abc import Iterable

from orchestrator.core.jobs.expected_duration import Expect, expectation
from orchestrator.core.model import Candidate, Devices, Running, Snapshot
from orchestrator.core.plan.options.fit import minimum_count
from orchestrator.core.plan.options.gang import islands

INFINITE = float("inf")

Release = tuple[float, int]
"""Seconds until an attempt ends, and the number of devices that it then frees on a node."""


def earliest_start_s(want: Candidate, suitable: Iterable[Devices], snapshot: Snapshot) -> float | None:
    """Return the seconds until enough devices are free on enough of the `suitable` nodes of one island.

    None if the end of too many of the jobs there is only guessed. Jobs that wait are ignored: those ahead in the queue
    may take the devices first.
    """
    existing = {have.id for have in snapshot.devices}
    nodes = [have for have in suitable if have.schedulable and have.id in existing]
    releases = _releases(snapshot, {have.id for have in nodes})
    times_s = (
        sorted(_free_after_s(want, have, releases.get(have.id, [])) for have in island)
        for island in islands(want, nodes).values()
        if len(island) >= want.nodes
    )
    earliest_s = min((each[want.nodes - 1] for each in times_s), default=INFINITE)
    return earliest_s if earliest_s < INFINITE else None


def _releases(snapshot: Snapshot, ids: set[str]) -> dict[str, list[Release]]:
    """Return what the running attempts will free, by devices id."""
    expect, releases = expectation(snapshot), dict[str, list[Release]]()
    for attempt in snapshot.running:
        if any(devices_id in ids for devices_id, _ in attempt.allocation):
            seconds = _ends_after_s(attempt, expect)
            for devices_id, numbers in attempt.allocation:
                releases.setdefault(devices_id, []).append((seconds, len(numbers)))
    return releases


def _ends_after_s(attempt: Running, expect: Expect) -> float:
    """Return the expected seconds until an attempt ends: 0 if it is stopping, infinite if they are only guessed."""
    if attempt.stopping:
        return 0.0
    if attempt.spec is None:
        return INFINITE
    kind = attempt.allocation[0][0].partition("/")[2]
    expected = expect(attempt.spec, kind, sum(len(numbers) for _, numbers in attempt.allocation))
    return expected.seconds if expected.has_evidence else INFINITE


def _free_after_s(want: Candidate, have: Devices, releases: list[Release]) -> float:
    free, needed = len(have.free), minimum_count(want, have)
    if free >= needed:
        return 0.0
    for seconds, count in sorted(releases):
        free += count
        if free >= needed:
            return seconds
    return INFINITE
