"""All hosts of a fleet file at once, before anything is started there: looked at, and prepared.

A host that fails stops `up`, unless its pool is optional or can do with fewer (`min_hosts`).
"""

import json
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from cluster import code_export, environments, identity, recipes
from cluster.errors import FleetError, PolyfleetError, SpecError, UserError
from cluster.fleet_spec import FleetSpec, Placement
from cluster.hosts import host_steps, shared_storage
from cluster.hosts.plan import Found, HostPlan, Wanted, planned
from cluster.hosts.ssh import Remote
from cluster.paths import home
from cluster.recipes import Recipe

MOST_AT_ONCE = 32
Progress = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Visit:
    """One host: what it is to have, what was `found` there or the `error` in its place, and how far we are. `storages`
    are the identities of its pools' storages, `python` is what nodes there can run from.
    """

    wanted: Wanted
    remote: Remote
    nodes: tuple[str, ...]
    found: Found | None = None
    plan: HostPlan | None = None
    error: PolyfleetError | None = None
    code: str = ""
    interpreters: Mapping[str, str] = field(default_factory=dict)
    storages: Mapping[str, str] = field(default_factory=dict)
    python: str = ""

    @property
    def name(self) -> str:
        return self.wanted.name

    def failed(self, error: PolyfleetError) -> "Visit":
        return replace(self, error=error)

    def view(self) -> dict[str, Any]:
        """A row of `polyfleet up --dry-run`."""
        seen = self.plan
        return {
            "host": self.wanted.host,
            "address": self.wanted.address,
            "pools": list(self.wanted.pools),
            "machine": seen.machine if seen else "",
            "python": seen.python if seen else "",
            "steps": list(seen.steps) if seen and not self.error else [],
            "warnings": list(seen.warnings) if seen else [],
            "problem": str(self.error) if self.error else "",
        }


def survey(spec: FleetSpec) -> list[Visit]:
    """Look at every host. What keeps one out stands in its `error`. Raises SpecError for a file that is not here."""
    _refuse_missing_files(spec)
    exported = code_export.export()
    asked = {"identity": identity.fleet_identity(home()), "code": exported.name}
    return each(visits(spec), lambda visit: _looked_at(visit, asked))


def _refuse_missing_files(spec: FleetSpec) -> None:
    owners = [("ssh", spec.ssh), *((f"pools.{name}.ssh", pool.ssh) for name, pool in spec.pools.items() if pool.ssh)]
    for owner, ssh in owners:
        for name, path in ssh.files():
            if not path.is_file():
                raise SpecError(f"{owner}.{name}", f"there is no file {path}", "name one that exists, or leave it out")


def visits(spec: FleetSpec) -> list[Visit]:
    """One for each host, which may have nodes of several pools."""
    by_host: dict[str, list[Placement]] = {}
    for placement in spec.placements:
        by_host.setdefault(placement.host.name, []).append(placement)
    visits = [_visit(spec, placements) for placements in by_host.values()]
    if spec.head.host and spec.head.host_name not in by_host:
        name, made = spec.head.host_name, {"head": recipes.of_nodes()}
        wanted = Wanted(name, spec.head.host, spec.head.address, (), made, leads=True, port=spec.head.port)
        visits.insert(0, Visit(wanted, Remote(spec.head.host, spec.ssh), ()))
    return visits


def _visit(spec: FleetSpec, placements: list[Placement]) -> Visit:
    first = placements[0]
    leads = first.host.name == spec.head.host_name
    pools = tuple(p.pool for p in placements)
    to_make = {p: made for p in pools if isinstance(made := _asked(spec, p), Recipe)}
    named = {p.host.address for p in placements if p.host.address} | ({spec.head.address} if leads else set())
    addresses = named or {resolved(first)}
    if len(addresses) > 1:
        field_name, given = f"pools.{pools[-1]}.hosts", ", ".join(sorted(addresses))
        raise SpecError(field_name, f"host {first.host.host} has several addresses: {given}", "name one of them")
    interpreters = tuple(path for p in pools if isinstance(path := _asked(spec, p), str))
    port = spec.head.port if leads else 0
    wanted = Wanted(first.host.name, first.host.host, addresses.pop(), pools, to_make, interpreters, leads, port)
    return Visit(wanted, Remote(first.host.host, first.ssh), tuple(p.node for p in placements))


def _asked(spec: FleetSpec, pool: str) -> Recipe | str:
    """The recipe of a pool's environment, or the path of the interpreter that it names."""
    wanted = spec.pools[pool].environment
    if wanted.interpreter:
        return wanted.interpreter
    made = environments.recipe_of(wanted)
    assert isinstance(made, Recipe)
    return made


def resolved(placement: Placement) -> str:
    """Its IP address by its name, or "" where only ssh's configuration knows it: then `address` is to be named."""
    try:
        found = socket.getaddrinfo(placement.host.host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    return str(found[0][4][0])


def _looked_at(visit: Visit, asked: Mapping[str, str]) -> Visit:
    if not visit.wanted.address:
        name, pool = visit.wanted.host, visit.wanted.pools[0]
        remedy = f"write {{host: {name}, address: IP}} in pools.{pool}.hosts"
        return visit.failed(UserError(f"the IP address of host {name} is unknown here", remedy))
    try:
        own = {
            "address": visit.wanted.address,
            "port": visit.wanted.port,
            "interpreters": list(visit.wanted.interpreters),
        }
        found = host_steps.look(visit.remote, {**asked, **own})
    except PolyfleetError as e:
        return visit.failed(e)
    made = planned(visit.wanted, found, _living(found))
    visit = replace(visit, found=found, plan=made)
    if made.problems:
        message, remedy = made.problems[0]
        return visit.failed(UserError(f"host {visit.wanted.host}: {message}", remedy))
    return visit


def _living(found: Found) -> list[str]:
    """Nodes on its record; whether they live is seen when it is joined."""
    try:
        return [p["node"] for p in json.loads(found.record)["processes"] if p["role"] in ("worker", "head")]
    except (ValueError, KeyError, TypeError):
        return []


def accepted(spec: FleetSpec, visits: list[Visit], progress: Progress) -> list[Visit]:
    """Those that can be used, when that is enough of every pool; the others are told. Raises the first error else."""
    good = [visit for visit in visits if visit.error is None]
    if lost := [visit for visit in visits if visit.error and visit.wanted.leads]:
        raise _of_all(lost) if lost[0].found else _without_head(_of_all(lost))
    for name, pool in spec.pools.items():
        have = sum(name in visit.wanted.pools for visit in good)
        enough = (pool.min_hosts or len(pool.hosts)) if not pool.optional else 0
        bad = [visit for visit in visits if visit.error and name in visit.wanted.pools]
        if bad and have < enough:
            raise _of_all(bad)
    for visit in visits:
        if visit.error is not None:
            progress(f"host {visit.wanted.host} is left out: {visit.error}")
    return good


def _without_head(error: PolyfleetError) -> PolyfleetError:
    kind = UserError if isinstance(error, UserError) else FleetError
    gone = "it is to have the head: where it is gone for good, `polyfleet down`, name another in `head`, and `up` again"
    return kind(error.message, "; ".join(filter(None, (error.remedy, gone))))


def _of_all(bad: list[Visit]) -> PolyfleetError:
    """The first error, with how many more there are."""
    first = bad[0].error
    assert first is not None
    if not bad[1:]:
        return first
    others = "; ".join(str(visit.error) for visit in bad[1:4])
    more = f" and {len(bad) - 4} more" if bad[4:] else ""
    kind = UserError if all(isinstance(visit.error, UserError) for visit in bad) else FleetError
    return kind(f"{first.message}; {first.remedy}; {others}{more}", "")


def prepare(spec: FleetSpec, visits: list[Visit], progress: Progress) -> list[Visit]:
    """Our code and the environments on every host. Errors stand in the visits."""
    exported = code_export.export()

    def prepared(visit: Visit) -> Visit:
        assert visit.found is not None
        for warning in visit.plan.warnings if visit.plan else ():
            progress(f"host {visit.wanted.host}: {warning}")
        try:
            there = host_steps.send_code(visit.remote, visit.found, exported)
            asked = {pool: (_asked(spec, pool), spec.pools[pool].storage) for pool in visit.wanted.pools}
            made = host_steps.prepare(visit.remote, visit.found, there, asked, progress)
        except PolyfleetError as e:
            return visit.failed(e)
        interpreters = {pool: told["interpreter"] for pool, told in made["pools"].items()}
        seen = {pool: told["storage"] for pool, told in made["pools"].items()}
        return replace(visit, code=there, interpreters=interpreters, storages=seen, python=made["node"])

    return each(visits, prepared)


def look_at_storages(spec: FleetSpec, visits: list[Visit], progress: Progress) -> None:
    """Tell of pools whose hosts share no storage. Raises SpecError where they are to share one."""
    seen: dict[str, dict[str, str]] = {}
    for visit in visits:
        for pool, storage in visit.storages.items():
            seen.setdefault(pool, {})[visit.wanted.host] = storage
    for told in shared_storage.warnings({name: pool.shared_storage for name, pool in spec.pools.items()}, seen):
        progress(told)


def each(items: list[Any], work: Callable[[Any], T]) -> list[T]:
    with ThreadPoolExecutor(min(MOST_AT_ONCE, max(1, len(items))), thread_name_prefix="host") as threads:
        return list(threads.map(work, items))
