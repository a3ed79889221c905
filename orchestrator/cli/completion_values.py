"""What the shell may complete an option or argument with: kinds from the catalogue; pools, nodes and jobs from the
server that runs. Nothing is started, nobody waits longer than WAIT_S, and nothing is said where no server answers.
"""

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.catalogue import DeviceModel
    from orchestrator.client import Client

WAIT_S = 0.25
COUNTS = ("1", "2", "4", "8")
LATEST_JOBS = 50
PLAIN = re.compile(r"[A-Za-z0-9._+@%:/-]+")
"""What no shell gives a meaning: a job of somebody else may be called `$(…)`, and what is completed is soon run."""


def backends(typed: str) -> list[str]:
    from cluster.catalogue import vendors

    return _listed(typed, lambda _: vendors())


def kind(typed: str) -> list[str]:
    return _starting(typed, _kinds(typed))


def kinds(typed: str) -> list[str]:
    """Several with commas, as wherever the name is a plural."""
    return _listed(typed, _kinds)


def accelerators(typed: str) -> list[str]:
    """BACKEND, MODEL or BACKEND:MODEL, and after a kind a number of devices; `nvidia:A100,H100` lists models."""
    from cluster.catalogue import is_backend

    kind, colon, count = typed.rpartition(":")
    if colon and not is_backend(kind):
        return [f"{kind}:{number}" for number in COUNTS if number.startswith(count)]
    if colon:
        return [f"{kind}:{one}" for one in _listed(count, lambda word: _models(kind, word))]
    return _listed(typed, lambda word: ["any", *_words(word), *_kinds(word)])


def pool(typed: str) -> list[str]:
    return _starting(typed, _from_server(_pools))


def pools(typed: str) -> list[str]:
    return _listed(typed, lambda _: _from_server(_pools))


def kind_or_pool(typed: str) -> list[str]:
    return _starting(typed, _kinds_and_pools(typed))


def kinds_and_pools(typed: str) -> list[str]:
    return _listed(typed, _kinds_and_pools)


def places(typed: str) -> list[str]:
    """`POOL:`; what is a path is left to the shell."""
    return [] if ":" in typed else [f"{pool}:" for pool in _from_server(_pools) if pool.startswith(typed)]


def jobs(typed: str) -> list[str]:
    """Names and ids of the latest jobs."""
    return _starting(typed, _from_server(_jobs))


def jobs_and_places(typed: str) -> list[str]:
    return [*jobs(typed), *places(typed)]


def nodes(typed: str) -> list[str]:
    return _starting(typed, _from_server(lambda client: (node["node"] for node in client.nodes())))


def states(typed: str) -> list[str]:
    """Of jobs, in the case in which the user began."""
    from orchestrator.core.states import State

    return _starting(typed, map(str.lower if typed.islower() else str, State.__members__))


def _listed(typed: str, of: Callable[[str], Iterable[str]]) -> list[str]:
    """What may follow the last comma, with all that stands before it."""
    before, comma, word = typed.rpartition(",")
    return [f"{before}{comma}{one}" for one in _starting(word, of(word)) if one not in before.split(",")]


def _starting(typed: str, words: Iterable[str]) -> list[str]:
    return [word for word in dict.fromkeys(words) if word.startswith(typed)]


def _kinds_and_pools(word: str) -> list[str]:
    return [*_kinds(word), *([] if ":" in word else _from_server(_pools))]


def _words(word: str) -> list[str]:
    """Models that may stand alone; with a size, and as others spell them, once a part is typed."""
    from cluster.catalogue import kind_spellings, resolve_name

    more = [name for row in _rows() for name in _spellings(row) if name.startswith(word)] if word else []
    return [*kind_spellings(), *(name for name in more if resolve_name(name))]


def _kinds(word: str) -> list[str]:
    """Back ends alone where nothing is typed: all kinds are some hundred."""
    from cluster.catalogue import aliases, vendors

    names = [*vendors(), *aliases()]
    backend, colon, begun = word.partition(":")
    if colon:
        return [f"{backend}:{model}" for model in _models(backend, begun)]
    within = [name for name in names if word and name.startswith(word)]
    return names + [f"{name}:{model}" for name in within for model in _listed_models(name)]


def _models(backend: str, begun: str) -> list[str]:
    """Those of the catalogue, and of the fleet that is up: slices, and cards that the catalogue lacks. Other spellings
    only once a part is typed."""
    there = [kind.partition(":") for kind in _from_server(_kinds_there)]
    found = _listed_models(backend) + [model for of, _, model in there if model and of == _vendor(backend)]
    return found + [name for row in _rows(backend) for name in _spellings(row)] if begun else found


def _listed_models(backend: str) -> list[str]:
    return [one.partition(":")[2] for row in _rows(backend) if ":" in row.kind for one in (row.family, row.kind)]


def _vendor(name: str) -> str:
    from cluster.catalogue import aliases

    return aliases().get(name, name)


def _rows(backend: str = "") -> "list[DeviceModel]":
    """What something computes on."""
    from cluster.catalogue import models

    return [row for row in models().values() if not row.unavailable and _vendor(backend) in ("", row.backend)]


def _spellings(row: "DeviceModel") -> list[str]:
    """But those with blanks, which a shell would part."""
    names = (row.model, row.kind.partition(":")[2], *row.spellings, *row.tool_names)
    return [name for name in names if name and " " not in name]


def _pools(client: "Client") -> Iterable[str]:
    return (pool["pool"] for pool in client.fleet()["pools"])


def _kinds_there(client: "Client") -> Iterable[str]:
    return (device["kind"] for node in client.nodes() for device in node["devices"])


def _jobs(client: "Client") -> Iterable[str]:
    rows = client.jobs(limit=LATEST_JOBS, fields=("id", "name"))
    return (row[field] for field in ("name", "id") for row in reversed(rows))


def _from_server(ask: Callable[["Client"], Iterable[str]]) -> list[str]:
    """In a thread, since a deadline of the client is one for each read, and it asks a busy server again."""
    from orchestrator.client import connect

    found: list[str] = []

    def work() -> None:
        with suppress(Exception), connect(start=False, progress=lambda _: None) as client:  # whoever types is not told
            found.extend(ask(client))

    thread = Thread(target=work, name="completion", daemon=True)
    thread.start()
    thread.join(WAIT_S)
    return [word for word in found if PLAIN.fullmatch(word)]
