"""Plan what `polyfleet up` would do on each host, and what prevents it. Pure: facts in, lines out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.environments.recipes import GB, Recipe

SKEW_S = 2.0
"""Clock differences above this give a warning: logs of several hosts are ordered by their clocks."""
HOME_BYTES = GB // 2
"""Needed in the home for logs, Ray's session and records of attempts; checkpoints need more."""
CODE_BYTES = GB // 100
DRIVERS = ("nvidia", "amd", "intel", "neuron", "tpu")
"""Back ends whose drivers `host_facts.py` looks for on Linux."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts of a host, as reported by `host_facts.py`.

    `absent` are the interpreters of its pools that it does not have; `has_port`: the requested port is free. `boot`
    differs between machines and between their boots, "" if unknown. Times are seconds since 1970, and `skew_s` is how
    far its clock is ahead of ours.
    """

    system: str
    machine: str
    release: str
    hostname: str
    boot: str
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
class HostRequest:
    """What a host is to run.

    `recipes` has, by pool, the environments; `interpreters` the paths of pools that name one instead. `leads`: it has
    the fleet's head, on `port` (0: any). `backends` has, by pool, those whose devices need a driver there.
    """

    name: str
    host: str
    address: str
    pools: tuple[str, ...]
    recipes: Mapping[str, Recipe]
    interpreters: tuple[str, ...] = ()
    leads: bool = False
    port: int = 0
    backends: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HostPlan:
    """Plan for one host: `steps` in order, `warnings`, and `problems` (message, remedy) that prevent it."""

    name: str
    host: str
    pools: tuple[str, ...]
    machine: str = ""
    python: str = ""
    steps: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    problems: tuple[tuple[str, str], ...] = ()


def make_plan(request: HostRequest, facts: HostFacts, running: Sequence[str]) -> HostPlan:
    """Make the plan of a host. `running` are the nodes of this fleet that run there already."""
    missing = [recipe for recipe in request.recipes.values() if not has_environment(facts, recipe)]
    return HostPlan(
        request.name,
        request.host,
        request.pools,
        ", ".join([f"{facts.system} {facts.machine}", f"{facts.cores} cores", *_drivers(request, facts)]),
        f"Python {facts.python_version}",
        tuple(_steps(request, facts.has_code, missing, running)),
        tuple(_warnings(request, facts)),
        tuple(_problems(request, facts, missing, running)),
    )


def plan_with_python(request: HostRequest, version: str, uv: str) -> HostPlan:
    """Make the plan of a host where `uv` is to install a Python. Its facts are collected after that."""
    steps = _steps(request, False, list(request.recipes.values()), ())
    install = f"install Python {version} with {uv}, then check the host"
    return HostPlan(request.name, request.host, request.pools, steps=(install, *steps))


def has_environment(facts: HostFacts, recipe: Recipe) -> bool:
    """Return whether the host has that environment, in one of its builds."""
    host_python = (facts.implementation, facts.python_version, facts.platform)
    return any(variant.key_on(*host_python) in facts.environments for variant in recipe.variants)


def _steps(request: HostRequest, has_code: bool, missing: Sequence[Recipe], running: Sequence[str]) -> Sequence[str]:
    nodes = [f"{pool}-{request.name}" for pool in request.pools]
    absent = [node for node in nodes if node not in running]
    names = dict.fromkeys(recipe.name for recipe in missing)
    steps = [] if has_code else ["send the code"]
    steps += [f"create environment {name}" for name in names]
    steps += ["start the head"] if request.leads and "head" not in running else []
    steps += [f"start node {node}" for node in absent]
    return steps or ["nothing to do: its nodes are running"]


def _drivers(request: HostRequest, facts: HostFacts) -> list[str]:
    used = dict.fromkeys(name for name in request.backends.values() if name in facts.drivers)
    return [f"{name} driver {facts.drivers[name]}" for name in used]


def _warnings(request: HostRequest, facts: HostFacts) -> list[str]:
    warnings = [
        f"no {backend} driver is loaded, and pool {pool} needs one: install it, or the node will have no device"
        for pool, backend in request.backends.items()
        if backend in DRIVERS and backend not in facts.drivers
    ]
    if abs(facts.skew_s) > SKEW_S:
        direction = "ahead of" if facts.skew_s > 0 else "behind"
        skew = f"its clock is {abs(facts.skew_s):.0f} s {direction} this machine's"
        warnings.append(f"{skew}: times in its logs are off by that")
    return warnings


def _problems(
    request: HostRequest, facts: HostFacts, missing: Sequence[Recipe], running: Sequence[str]
) -> list[tuple[str, str]]:
    problems = []
    if not facts.has_address:
        message = f"{request.address} is not an address of this host"
        problems.append((message, f"`ip address` on {request.host} lists them; correct `address`"))
    elif not facts.has_port and "head" not in running:
        message = f"port {request.port} of {request.address} is in use by another program, or this user may not use it"
        problems.append((message, "name another port in `head.port`, or leave `head.port` out"))
    if not facts.home_writable:
        problems.append((f"{facts.home} cannot be written", "give the user write access, or name another `ssh.user`"))
    for path in facts.absent:
        problems.append(
            (
                f"there is no Python interpreter at {path}",
                "name an existing one, or a lock, in the pool's `environment`",
            )
        )
    if missing and not facts.has_venv:
        problems.append(("its Python has no venv module", "install it; on Debian and Ubuntu: apt install python3-venv"))
    needed = sum({recipe.name: recipe.building_bytes for recipe in missing}.values())
    if missing and facts.cache_free_bytes < needed + CODE_BYTES:
        free = f"{facts.cache_free_bytes / GB:.1f} GB are free"
        message = f"its environments need {needed / GB:.1f} GB in {facts.cache}, {free}"
        problems.append((message, "free disk space there, or set POLYFLEET_CACHE there to a folder on another disk"))
    if facts.home_free_bytes < HOME_BYTES:
        message = f"{facts.home} needs {HOME_BYTES / GB:.1f} GB, {facts.home_free_bytes / GB:.1f} GB are free"
        problems.append((message, "free disk space there"))
    return problems


def parse_facts(reply: Mapping[str, Any], requested_s: float, answered_s: float) -> HostFacts:
    """Return the facts in the reply of `host_facts.py`.

    The host's clock is compared with the middle of the request's duration here.
    """
    fields = {name: reply[name] for name in HostFacts.__slots__ if name in reply}
    skew_s = float(reply["time_s"]) - (requested_s + answered_s) / 2
    return HostFacts(**fields | {name: tuple(reply[name]) for name in ("environments", "absent")}, skew_s=skew_s)
