"""Configuration of faults: a seed enables each kind, so that rare combinations occur (swarm testing)."""

from dataclasses import dataclass, fields
from random import Random

ON = 0.35
"""Chance that a kind of fault is on in a world."""


@dataclass(slots=True)
class Faults:
    """Fields `*_s`: mean seconds between faults of a kind, 0 if it is off. Other fields: probabilities."""

    agent_killed_s: float = 0.0
    agent_stopped_s: float = 0.0
    agent_fails_s: float = 0.0
    machine_frozen_s: float = 0.0
    attempt_frozen_s: float = 0.0
    raylet_killed_s: float = 0.0
    power_lost_s: float = 0.0
    disk_wiped_s: float = 0.0
    machine_gone_s: float = 0.0
    rank_killed_s: float = 0.0
    cut_both_s: float = 0.0
    cut_in_s: float = 0.0
    cut_out_s: float = 0.0
    flapping_s: float = 0.0
    fences_away_s: float = 0.0
    ray_away_s: float = 0.0
    head_lost_s: float = 0.0
    second_of_name_s: float = 0.0
    ray_is_stuck_s: float = 0.0
    notice_s: float = 0.0
    server_killed_s: float = 0.0
    server_stopped_s: float = 0.0
    older_backup_s: float = 0.0
    store_refuses_s: float = 0.0
    clock_set_s: float = 0.0
    lost: float = 0.0
    doubled: float = 0.0
    slow: float = 0.0
    unreadable: float = 0.0
    secret_missing: float = 0.0
    crash_points: float = 0.0
    fences_fail: float = 0.0
    start_refused: float = 0.0
    upload_conflicts: float = 0.0

    @property
    def on(self) -> tuple[str, ...]:
        return tuple(f.name for f in fields(self) if getattr(self, f.name))


CHANCES = {
    "lost": 0.03,
    "doubled": 0.05,
    "slow": 0.1,
    "unreadable": 0.003,
    "secret_missing": 0.02,
    "crash_points": 0.002,
    "fences_fail": 0.1,
    "start_refused": 0.05,
    "upload_conflicts": 0.05,
}
RARE = {"older_backup_s": 400.0, "head_lost_s": 300.0, "disk_wiped_s": 200.0, "machine_gone_s": 300.0}
OFTEN_S = 60.0


def swarm(rng: Random) -> Faults:
    """Choose the faults of a world. One world in eight has none."""
    faults = Faults()
    quiet = rng.random() < 0.125
    for f in fields(Faults):
        if not quiet and rng.random() < ON:
            scale = rng.choice((0.5, 1.0, 3.0))
            setattr(faults, f.name, CHANCES[f.name] if f.name in CHANCES else RARE.get(f.name, OFTEN_S) * scale)
    return faults
