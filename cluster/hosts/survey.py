"""Inspect and prepare all hosts of a fleet file at once, before anything is started there.

A host that fails stops `up`, unless its pool is optional or needs fewer hosts (`min_hosts`).
"""

import json
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from cluster.environments import code_export, environments, recipes
from cluster.environments.recipes import Recipe
from cluster.errors import FleetError, PolyfleetError, SpecError, UserError
from cluster.fleet import identity
from cluster.fleet.fleet_spec import FleetSpec, Placement
from cluster.hosts import host_python, host_steps, shared_storage
from cluster.hosts.plan import HostFacts, HostPlan, HostRequest, make_plan, plan_with_python
from cluster.hosts.ssh import Remote
from cluster.paths import home

MAX_CONCURRENT = 32
Progress = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HostState:
    """State of one host during `up`: what it is to run, and the facts `facts` there or the `error`.

    `storages` are the identities of its pools' storages, `python` is the Python that its nodes run from. `uv` is the
    program there that is to install a Python, where it has none.
    """

    request: HostRequest
    remote: Remote
    nodes: tuple[str, ...]
    facts: HostFacts | None = None
    plan: HostPlan | None = None
    error: PolyfleetError | None = None
    code: str = ""
    interpreters: Mapping[str, str] = field(default_factory=dict)
    storages: Mapping[str, str] = field(default_factory=dict)
    python: str = ""
    uv: str = ""

    @property
    def name(self) -> str:
        return self.request.name

    def with_error(self, error: PolyfleetError) -> "HostState":
        return replace(self, error=error)

    def view(self) -> dict[str, Any]:
        """Return a row of `polyfleet up --dry-run`."""
        plan = self.plan
        return {
            "host": self.request.host,
            "address": self.request.address,
            "pools": list(self.request.pools),
            "machine": plan.machine if plan else "",
            "python": plan.python if plan else "",
            "steps": list(plan.steps) if plan and not self.error else [],
            "warnings": list(plan.warnings) if plan else [],
            "problem": str(self.error) if self.error else "",
        }


def survey(spec: FleetSpec) -> list[HostState]:
    """Inspect every host; a host that cannot be used has an `error`.

    Raises SpecError for a missing local file.
    """
    _check_ssh_files(spec)
    request = _shared_request()
    return check_distinct(map_in_threads(visits(spec), lambda visit: _inspect(visit, request)))


def _shared_request() -> dict[str, str]:
    return {"identity": identity.fleet_identity(home()), "code": code_export.export().name}


def install_pythons(visits: list[HostState], progress: Progress) -> list[HostState]:
    """Install a Python on the hosts that have none but have `uv`, and inspect these. Errors are in the visits."""
    request = _shared_request()

    def installed(visit: HostState) -> HostState:
        if not visit.uv:
            return visit
        progress(f"host {visit.request.host}: installing Python {host_python.VERSION} with {visit.uv}")
        try:
            host_python.install(visit.remote, visit.uv)
        except PolyfleetError as e:
            return visit.with_error(e)
        return _inspect(replace(visit, uv="", plan=None), request, may_install=False)

    return check_distinct(map_in_threads(visits, installed)) if any(visit.uv for visit in visits) else visits


def check_distinct(visits: list[HostState]) -> list[HostState]:
    """Return the hosts; a name of a machine that another name before it has already has an `error`.

    Its devices would belong to two nodes. Containers of one machine have different host names.
    """
    first_names: dict[tuple[str, str], str] = {}
    return [_check_first(visit, first_names) for visit in visits]


def _check_first(visit: HostState, first_names: dict[tuple[str, str], str]) -> HostState:
    if visit.facts is None or not visit.facts.boot:
        return visit
    name = first_names.setdefault((visit.facts.boot, visit.facts.hostname), visit.request.host)
    if name == visit.request.host:
        return visit
    message = f"hosts {name} and {visit.request.host} are the same machine, {visit.facts.hostname}"
    return visit.with_error(UserError(message, "write the same name for it everywhere in the fleet file"))


def _check_ssh_files(spec: FleetSpec) -> None:
    ssh_settings = [
        ("ssh", spec.ssh),
        *((f"pools.{name}.ssh", pool.ssh) for name, pool in spec.pools.items() if pool.ssh),
    ]
    for owner, ssh in ssh_settings:
        for name, path in ssh.files():
            if not path.is_file():
                raise SpecError(f"{owner}.{name}", f"there is no file {path}", "name one that exists, or leave it out")


def visits(spec: FleetSpec) -> list[HostState]:
    """Return one visit for each host, which may have nodes of several pools."""
    by_host: dict[str, list[Placement]] = {}
    for placement in spec.placements:
        by_host.setdefault(placement.host.name, []).append(placement)
    visits = [_visit(spec, placements) for placements in by_host.values()]
    if spec.head.host and spec.head.host_name not in by_host:
        name, recipe_by_pool = spec.head.host_name, {"head": recipes.node_recipe()}
        request = HostRequest(
            name, spec.head.host, spec.head.address, (), recipe_by_pool, leads=True, port=spec.head.port
        )
        visits.insert(0, HostState(request, Remote(spec.head.host, spec.ssh), ()))
    return visits


def _visit(spec: FleetSpec, placements: list[Placement]) -> HostState:
    first = placements[0]
    leads = first.host.name == spec.head.host_name
    pools = tuple(p.pool for p in placements)
    to_make = {p: recipe for p in pools if isinstance(recipe := _environment_source(spec, p), Recipe)}
    declared = {p.host.address for p in placements if p.host.address} | ({spec.head.address} if leads else set())
    addresses = declared or {resolve_address(first)}
    if len(addresses) > 1:
        field_name, listed = f"pools.{pools[-1]}.hosts", ", ".join(sorted(addresses))
        raise SpecError(field_name, f"host {first.host.host} has several addresses: {listed}", "keep one of them")
    interpreters = tuple(path for p in pools if isinstance(path := _environment_source(spec, p), str))
    port = spec.head.port if leads else 0
    backends = {p: spec.pools[p].backend for p in pools if spec.pools[p].counts_devices}
    request = HostRequest(
        first.host.name, first.host.host, addresses.pop(), pools, to_make, interpreters, leads, port, backends
    )
    return HostState(request, Remote(first.host.host, first.ssh), tuple(p.node for p in placements))


def _environment_source(spec: FleetSpec, pool: str) -> Recipe | str:
    """Return the recipe of a pool's environment, or the path of the interpreter that it names."""
    environment = spec.pools[pool].environment
    if environment.interpreter:
        return environment.interpreter
    recipe = environments.recipe_of(environment)
    assert isinstance(recipe, Recipe)
    return recipe


def resolve_address(placement: Placement) -> str:
    """Return the host's IP address by its name, or "" if only ssh's configuration has the name.

    `address` must then be in the fleet file.
    """
    try:
        matches = socket.getaddrinfo(placement.host.host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    return str(matches[0][4][0])


def _inspect(visit: HostState, request: Mapping[str, str], *, may_install: bool = True) -> HostState:
    if not visit.request.address:
        name, pool = visit.request.host, visit.request.pools[0]
        remedy = f"write {{host: {name}, address: IP}} in pools.{pool}.hosts"
        return visit.with_error(UserError(f"the IP address of host {name} cannot be looked up on this machine", remedy))
    try:
        host_request = {
            "address": visit.request.address,
            "port": visit.request.port,
            "interpreters": list(visit.request.interpreters),
        }
        facts = host_steps.inspect_host(visit.remote, {**request, **host_request})
    except host_python.PythonMissing as e:
        if not (e.uv and may_install):
            return visit.with_error(e)
        return replace(visit, uv=e.uv, plan=plan_with_python(visit.request, host_python.VERSION, e.uv))
    except PolyfleetError as e:
        return visit.with_error(e)
    plan = make_plan(visit.request, facts, _recorded_nodes(facts))
    visit = replace(visit, facts=facts, plan=plan)
    if plan.problems:
        message, remedy = plan.problems[0]
        return visit.with_error(UserError(f"host {visit.request.host}: {message}", remedy))
    return visit


def _recorded_nodes(facts: HostFacts) -> list[str]:
    """Return the nodes on the host's record. Whether they run is checked when the host is joined."""
    try:
        return [p["node"] for p in json.loads(facts.record)["processes"] if p["role"] in ("worker", "head")]
    except (ValueError, KeyError, TypeError):
        return []


def usable_hosts(spec: FleetSpec, visits: list[HostState], progress: Progress) -> list[HostState]:
    """Return the hosts that can be used, if these are enough for every pool; print the others.

    Otherwise raises the first error.
    """
    usable = [visit for visit in visits if visit.error is None]
    if lost := [visit for visit in visits if visit.error and visit.request.leads]:
        raise _combined_error(lost) if lost[0].facts else _head_error(_combined_error(lost))
    for name, pool in spec.pools.items():
        usable_count = sum(name in visit.request.pools for visit in usable)
        min_count = (pool.min_hosts or len(pool.hosts)) if not pool.optional else 0
        failed = [visit for visit in visits if visit.error and name in visit.request.pools]
        if failed and usable_count < min_count:
            raise _combined_error(failed)
    for visit in visits:
        if visit.error is not None:
            progress(f"host {visit.request.host} is skipped: {visit.error}")
    return usable


def _head_error(error: PolyfleetError) -> PolyfleetError:
    kind = UserError if isinstance(error, UserError) else FleetError
    advice = (
        "this host is to run the head: if it is lost for good, run `polyfleet down`, name another host in `head`, and "
        "run `polyfleet up` again"
    )
    return kind(error.message, "; ".join(filter(None, (error.remedy, advice))))


def _combined_error(failed: list[HostState]) -> PolyfleetError:
    """Combine the errors of several hosts: the first, up to three more, and the number of the rest."""
    first = failed[0].error
    assert first is not None
    if not failed[1:]:
        return first
    others = "; ".join(str(visit.error) for visit in failed[1:4])
    more = f" and {len(failed) - 4} more" if failed[4:] else ""
    kind = UserError if all(isinstance(visit.error, UserError) for visit in failed) else FleetError
    return kind(f"{first.message}; {first.remedy}; {others}{more}", "")


def prepare(spec: FleetSpec, visits: list[HostState], progress: Progress) -> list[HostState]:
    """Send our code to every host and create its environments. Errors are in the visits."""
    exported = code_export.export()

    def prepared(visit: HostState) -> HostState:
        assert visit.facts is not None
        for warning in visit.plan.warnings if visit.plan else ():
            progress(f"host {visit.request.host}: {warning}")
        try:
            code_folder = host_steps.send_code(visit.remote, visit.facts, exported)
            pool_environments = {
                pool: (_environment_source(spec, pool), spec.pools[pool].storage_folder) for pool in visit.request.pools
            }
            result = host_steps.prepare(visit.remote, visit.facts, code_folder, pool_environments, progress)
        except PolyfleetError as e:
            return visit.with_error(e)
        interpreters = {pool: reply["interpreter"] for pool, reply in result["pools"].items()}
        storages = {pool: reply["storage"] for pool, reply in result["pools"].items()}
        return replace(visit, code=code_folder, interpreters=interpreters, storages=storages, python=result["node"])

    return map_in_threads(visits, prepared)


def check_storages(spec: FleetSpec, visits: list[HostState], progress: Progress) -> None:
    """Print the pools whose hosts do not share a storage. Raises SpecError if they are to share one."""
    storages: dict[str, dict[str, str]] = {}
    for visit in visits:
        for pool, storage in visit.storages.items():
            if not spec.pools[pool].object_store:
                storages.setdefault(pool, {})[visit.request.host] = storage
    for warning in shared_storage.warnings({name: pool.shared_storage for name, pool in spec.pools.items()}, storages):
        progress(warning)


def map_in_threads(items: list[Any], work: Callable[[Any], T]) -> list[T]:
    with ThreadPoolExecutor(min(MAX_CONCURRENT, max(1, len(items))), thread_name_prefix="host") as threads:
        return list(threads.map(work, items))
