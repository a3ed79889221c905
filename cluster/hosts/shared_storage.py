"""Check whether the machines of a pool share one storage, for `up` and for `doctor`. Pure functions."""

from collections.abc import Iterable, Iterator, Mapping

from cluster.errors import SpecError
from cluster.types import Finding, NodeFacts

MAX_NAMED = 8
KEEP_REMEDY = (
    "mount one folder on all of them and name it as the pool's `storage`; or give jobs checkpoint: {replicas: 1}, or "
    "recovery: {on_disconnect: wait}"
)
SHARE_REMEDY = "mount one shared folder there on each of them, or leave `shared_storage` out"


def storage_difference(pool: str, by_host: Mapping[str, str]) -> str:
    """Return a message about hosts whose storages differ; "" if they share one.

    `by_host` has the identity of each host's storage, "" if it is unknown.
    """
    identities = {host: storage for host, storage in by_host.items() if storage}
    if len(set(identities.values())) < 2:
        return ""
    groups = [
        [host for host in identities if identities[host] == storage] for storage in dict.fromkeys(identities.values())
    ]
    names = [" and ".join(group) for group in groups[:MAX_NAMED]]
    more = f"; and {len(groups) - MAX_NAMED} more" if len(groups) > MAX_NAMED else ""
    listing = f"{'; '.join(names)}{more}"
    return f"pool {pool} has {len(groups)} separate storages ({listing}): a lost host takes its checkpoints with it"


def warnings(declared: Mapping[str, bool], storages: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return warnings about pools whose hosts do not share a storage.

    `declared`: whether a pool's storage is to be shared; `storages`: pool -> host -> identity of its storage. Raises
    SpecError, naming the hosts, if a storage that is to be shared is not.
    """
    for pool, by_host in storages.items():
        if declared.get(pool) and len(by_host) > 1:
            _check_shared(pool, by_host)
    return [
        f"{message}; {KEEP_REMEDY}"
        for pool, by_host in storages.items()
        if (message := storage_difference(pool, by_host))
    ]


def _check_shared(pool: str, by_host: Mapping[str, str]) -> None:
    field = f"pools.{pool}.shared_storage"
    if unreadable := [host for host, storage in by_host.items() if not storage]:
        message = (
            f"the storage of {', '.join(unreadable)} can neither be written nor read: it cannot be checked for sharing"
        )
        raise SpecError(field, message, "give the user write access to that folder")
    if difference := storage_difference(pool, by_host):
        raise SpecError(field, difference, SHARE_REMEDY)


def findings(nodes: Iterable[NodeFacts], declared: Mapping[str, bool]) -> Iterator[Finding]:
    """Yield the findings for `doctor`.

    Nodes of one machine have separate storages on purpose: they are lost together. Nodes of a pool that has an object
    store upload what they save.
    """
    storages: dict[str, dict[str, str]] = {}
    machines: dict[str, set[tuple[str, str]]] = {}
    for facts in (facts for facts in nodes if not facts.object_store):
        storages.setdefault(facts.pool, {})[facts.node] = facts.storage_id
        machines.setdefault(facts.pool, set()).add((facts.host, facts.address))
    for pool, by_node in sorted(storages.items()):
        if len(machines[pool]) > 1 and (message := storage_difference(pool, by_node)):
            shared = declared.get(pool, False)
            yield Finding("error" if shared else "info", "storage", message, SHARE_REMEDY if shared else KEEP_REMEDY)
