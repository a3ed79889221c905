"""What `polyfleet up` would do on each host, and what keeps it from that. Pure: what was found in, lines out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.recipes import GB, Recipe

SKEW_S = 2.0
"""Clocks that differ by more are told: logs of several hosts are put in order by them."""
HOME_BYTES = GB // 2
"""Logs, Ray's session and the records of attempts; checkpoints come on top."""
CODE_BYTES = GB // 100


@dataclass(frozen=True, slots=True)
class Found:
    """What `host_facts.py` told of a host; `absent` are interpreters of its pools that it has not got, `has_port`: the
    port wanted there is free. Times are in seconds since 1970, and `skew_s` is how much its clock is ahead of ours.
    """

    system: str
    machine: str
    release: str
    hostname: str
    python: str
    implementation: str
    python_version: str
    platform: str
    has_venv: bool
    user: int
    cores: int
    time_s: float
    home: str
    cache: str
    home_free_bytes: int
    cache_free_bytes: int
    home_writable: bool
    environments: tuple[str, ...]
    has_code: bool
    has_address: bool
    has_port: bool
    record: str
    drivers: Mapping[str, str]
    absent: tuple[str, ...]
    skew_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a host is to have: `recipes` by pool, the interpreters of the pools that name one instead, and whether it
    `leads`: has the fleet's head, on `port` (0: any).
    """

    name: str
    host: str
    address: str
    pools: tuple[str, ...]
    recipes: Mapping[str, Recipe]
    interpreters: tuple[str, ...] = ()
    leads: bool = False
    port: int = 0


@dataclass(frozen=True, slots=True)
class HostPlan:
    """`steps` in the order in which they will be done; `warnings` do not stop it, `problems` do: (message, remedy)."""

    name: str
    host: str
    pools: tuple[str, ...]
    machine: str = ""
    python: str = ""
    steps: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    problems: tuple[tuple[str, str], ...] = ()


def planned(wanted: Wanted, found: Found, living: Sequence[str]) -> HostPlan:
    """`living` are the nodes of this fleet that live there already."""
    missing = [recipe for recipe in wanted.recipes.values() if not has(found, recipe)]
    return HostPlan(
        wanted.name,
        wanted.host,
        wanted.pools,
        f"{found.system} {found.machine}, {found.cores} cores",
        f"Python {found.python_version}",
        tuple(_steps(wanted, found, missing, living)),
        tuple(_warnings(found)),
        tuple(_problems(wanted, found, missing, living)),
    )


def has(found: Found, recipe: Recipe) -> bool:
    """Whether the host has that environment, in one of its builds."""
    where = (found.implementation, found.python_version, found.platform)
    return any(one.key_on(*where) in found.environments for one in recipe.variants)


def _steps(wanted: Wanted, found: Found, missing: Sequence[Recipe], living: Sequence[str]) -> Sequence[str]:
    nodes = [f"{pool}-{wanted.name}" for pool in wanted.pools]
    absent = [node for node in nodes if node not in living]
    names = dict.fromkeys(recipe.name for recipe in missing)
    steps = [] if found.has_code else ["send the code"]
    steps += [f"make environment {name}" for name in names]
    steps += ["start the head"] if wanted.leads and "head" not in living else []
    steps += [f"start node {node}" for node in absent]
    return steps or ["nothing: its nodes run"]


def _warnings(found: Found) -> list[str]:
    if abs(found.skew_s) <= SKEW_S:
        return []
    way = "ahead of" if found.skew_s > 0 else "behind"
    return [f"its clock is {abs(found.skew_s):.0f} s {way} this machine's: times in its logs are off by that"]


def _problems(wanted: Wanted, found: Found, missing: Sequence[Recipe], living: Sequence[str]) -> list[tuple[str, str]]:
    problems = []
    if not found.has_address:
        said = f"{wanted.address} is not an address of this host"
        problems.append((said, f"`ip address` on {wanted.host} lists them; correct `address`"))
    elif not found.has_port and "head" not in living:
        said = f"port {wanted.port} of {wanted.address} is in use by another program, or is not this user's to use"
        problems.append((said, "name another one in `head.port`, or leave that out"))
    if not found.home_writable:
        problems.append((f"{found.home} cannot be written", "free the folder for the user, or name another `ssh.user`"))
    for path in found.absent:
        problems.append(
            (f"there is no Python interpreter at {path}", "name one in the pool's `environment`, or a lock")
        )
    if missing and not found.has_venv:
        problems.append(("its Python has no venv module", "install it; on Debian and Ubuntu: apt install python3-venv"))
    needed = sum({recipe.name: recipe.building_bytes for recipe in missing}.values())
    if missing and found.cache_free_bytes < needed + CODE_BYTES:
        free = f"{found.cache_free_bytes / GB:.1f} GB are free"
        said = f"its environments need {needed / GB:.1f} GB in {found.cache}, {free}"
        problems.append((said, "free some disk there, or set POLYFLEET_CACHE there to a folder on another"))
    if found.home_free_bytes < HOME_BYTES:
        said = f"{found.home} needs {HOME_BYTES / GB:.1f} GB, {found.home_free_bytes / GB:.1f} GB are free"
        problems.append((said, "free some disk there"))
    return problems


def from_look(told: Mapping[str, Any], asked_s: float, answered_s: float) -> Found:
    """The clock is compared with the middle of the question's time here."""
    fields = {name: told[name] for name in Found.__slots__ if name in told}
    skew_s = float(told["time_s"]) - (asked_s + answered_s) / 2
    return Found(**fields | {name: tuple(told[name]) for name in ("environments", "absent")}, skew_s=skew_s)
