"""Whether the machines of a pool see one storage: told at `up`, and by `doctor` of nodes that are up. Pure."""

from collections.abc import Iterable, Iterator, Mapping

from cluster.errors import SpecError
from cluster.types import Finding, NodeFacts

NAMED = 8
KEEPS = (
    "mount one folder on all of them and name it as the pool's `storage`; or give jobs checkpoint: {replicas: 1}, or "
    "recovery: {on_disconnect: wait}"
)
SHARES = "mount that folder on each of them from one place, or leave shared_storage out"


def apart(pool: str, by_host: Mapping[str, str]) -> str:
    """What to tell of hosts whose storages differ, "" where they share one. `by_host`: a storage's identity, "" where
    it cannot be told.
    """
    known = {host: storage for host, storage in by_host.items() if storage}
    if len(set(known.values())) < 2:
        return ""
    groups = [[host for host in known if known[host] == storage] for storage in dict.fromkeys(known.values())]
    told = [" and ".join(group) for group in groups[:NAMED]]
    more = f", and {len(groups) - NAMED} more" if len(groups) > NAMED else ""
    named = f"{', of '.join(told)}{more}"
    return f"pool {pool} has {len(groups)} storages, of {named}: where a host is lost, so are checkpoints"


def warnings(declared: Mapping[str, bool], seen: Mapping[str, Mapping[str, str]]) -> list[str]:
    """`declared`: whether a pool's storage is to be shared; `seen`: pool -> host -> identity of its storage. Raises
    SpecError where one that is to be shared is not, naming the hosts.
    """
    for pool, by_host in seen.items():
        if declared.get(pool) and len(by_host) > 1:
            _refuse(pool, by_host)
    return [f"{told}; {KEEPS}" for pool, by_host in seen.items() if (told := apart(pool, by_host))]


def _refuse(pool: str, by_host: Mapping[str, str]) -> None:
    field = f"pools.{pool}.shared_storage"
    if blind := [host for host, storage in by_host.items() if not storage]:
        said = (
            f"the storage of {', '.join(blind)} can neither be written nor read: nobody can tell whether it is shared"
        )
        raise SpecError(field, said, "give the user the right to write there")
    if told := apart(pool, by_host):
        raise SpecError(field, told, SHARES)


def findings(nodes: Iterable[NodeFacts], declared: Mapping[str, bool]) -> Iterator[Finding]:
    """For `doctor`. Storages of one machine are apart on purpose, and are lost together."""
    seen: dict[str, dict[str, str]] = {}
    machines: dict[str, set[tuple[str, str]]] = {}
    for facts in nodes:
        seen.setdefault(facts.pool, {})[facts.node] = facts.storage_id
        machines.setdefault(facts.pool, set()).add((facts.host, facts.address))
    for pool, by_node in sorted(seen.items()):
        if len(machines[pool]) > 1 and (told := apart(pool, by_node)):
            shared = declared.get(pool, False)
            yield Finding("error" if shared else "info", "storage", told, SHARES if shared else KEEPS)
