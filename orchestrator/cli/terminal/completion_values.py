"""Values that the shell proposes for an option or argument: kinds from the catalogue; pools, nodes and jobs from the
running server. No server is started, a completion waits at most WAIT_S, and without a server there is no message.
"""

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.catalogue import DeviceModel
    from orchestrator.client.client import Client

WAIT_S = 0.25
COUNTS = ("1", "2", "4", "8")
MAX_JOBS = 50
SAFE_NAME = re.compile(r"[A-Za-z0-9._+@%:/-]+")
"""Characters without a meaning in any shell: another user's job may be called `$(…)`, and completed text is soon run.
"""


def backends(typed: str) -> list[str]:
    from cluster.catalogue import vendors

    return _complete_list(typed, lambda _: vendors())


def kind(typed: str) -> list[str]:
    return _with_prefix(typed, _kinds(typed))


def kinds(typed: str) -> list[str]:
    """Comma-separated kinds, as for every option with a plural name."""
    return _complete_list(typed, _kinds)


def accelerators(typed: str) -> list[str]:
    """BACKEND, MODEL or BACKEND:MODEL, and after a kind a number of devices; `nvidia:A100,H100` lists models."""
    from cluster.catalogue import is_backend

    kind, colon, count = typed.rpartition(":")
    if colon and not is_backend(kind):
        return [f"{kind}:{number}" for number in COUNTS if number.startswith(count)]
    if colon:
        return [f"{kind}:{one}" for one in _complete_list(count, lambda item: _models(kind, item))]
    return _complete_list(typed, lambda item: ["any", *_model_names(item), *_kinds(item)])


def pool(typed: str) -> list[str]:
    return _with_prefix(typed, _from_server(_pools))


def pools(typed: str) -> list[str]:
    return _complete_list(typed, lambda _: _from_server(_pools))


def kind_or_pool(typed: str) -> list[str]:
    return _with_prefix(typed, _kinds_and_pools(typed))


def kinds_and_pools(typed: str) -> list[str]:
    return _complete_list(typed, _kinds_and_pools)


def pool_prefixes(typed: str) -> list[str]:
    """Values `POOL:`; paths are left to the shell."""
    return [] if ":" in typed else [f"{pool}:" for pool in _from_server(_pools) if pool.startswith(typed)]


def jobs(typed: str) -> list[str]:
    """Names and ids of the latest jobs."""
    return _with_prefix(typed, _from_server(_jobs))


def jobs_and_pools(typed: str) -> list[str]:
    return [*jobs(typed), *pool_prefixes(typed)]


def nodes(typed: str) -> list[str]:
    return _with_prefix(typed, _from_server(lambda client: (node["node"] for node in client.nodes.list())))


def states(typed: str) -> list[str]:
    """Job states, in lower case if the user typed lower case."""
    from orchestrator.core.states import State

    return _with_prefix(typed, map(str.lower if typed.islower() else str, State.__members__))


def _complete_list(typed: str, complete: Callable[[str], Iterable[str]]) -> list[str]:
    """Complete the item after the last comma; keep the text before it."""
    before, comma, last_item = typed.rpartition(",")
    return [
        f"{before}{comma}{one}" for one in _with_prefix(last_item, complete(last_item)) if one not in before.split(",")
    ]


def _with_prefix(typed: str, names: Iterable[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.startswith(typed)]


def _kinds_and_pools(typed: str) -> list[str]:
    return [*_kinds(typed), *([] if ":" in typed else _from_server(_pools))]


def _model_names(typed: str) -> list[str]:
    """Names of models that need no back end; once a part is typed, also with a size and in other spellings."""
    from cluster.catalogue import kind_spellings, resolve_name

    spelled = [name for row in _rows() for name in _spellings(row) if name.startswith(typed)] if typed else []
    return [*kind_spellings(), *(name for name in spelled if resolve_name(name))]


def _kinds(typed: str) -> list[str]:
    """Kinds that match; only back ends if nothing is typed, since there are some hundred kinds."""
    from cluster.catalogue import aliases, vendors

    names = [*vendors(), *aliases()]
    backend, colon, model_prefix = typed.partition(":")
    if colon:
        return [f"{backend}:{model}" for model in _models(backend, model_prefix)]
    matching = [name for name in names if typed and name.startswith(typed)]
    return names + [f"{name}:{model}" for name in matching for model in _listed_models(name)]


def _models(backend: str, model_prefix: str) -> list[str]:
    """Models of the catalogue and of the running fleet, which may have slices and cards that the catalogue lacks. Other
    spellings are included once a part is typed."""
    fleet_kinds = [kind.partition(":") for kind in _from_server(_fleet_kinds)]
    names = _listed_models(backend) + [model for of, _, model in fleet_kinds if model and of == _vendor(backend)]
    return names + [name for row in _rows(backend) for name in _spellings(row)] if model_prefix else names


def _listed_models(backend: str) -> list[str]:
    return [one.partition(":")[2] for row in _rows(backend) if ":" in row.kind for one in (row.family, row.kind)]


def _vendor(name: str) -> str:
    from cluster.catalogue import aliases

    return aliases().get(name, name)


def _rows(backend: str = "") -> "list[DeviceModel]":
    """Device models of the catalogue that are available."""
    from cluster.catalogue import models

    return [row for row in models().values() if not row.unavailable and _vendor(backend) in ("", row.backend)]


def _spellings(row: "DeviceModel") -> list[str]:
    """Names of a model, without those with blanks, which a shell would split."""
    names = (row.model, row.kind.partition(":")[2], *row.spellings, *row.tool_names)
    return [name for name in names if name and " " not in name]


def _pools(client: "Client") -> Iterable[str]:
    return (pool["pool"] for pool in client.fleet.show()["pools"])


def _fleet_kinds(client: "Client") -> Iterable[str]:
    return (device["kind"] for node in client.nodes.list() for device in node["devices"])


def _jobs(client: "Client") -> Iterable[str]:
    rows = client.jobs.list(limit=MAX_JOBS, fields="id,name")
    return (row[field] for field in ("name", "id") for row in reversed(rows))


def _from_server(query: Callable[["Client"], Iterable[str]]) -> list[str]:
    """Names from the server. In a thread, because the client's time-outs apply to single reads, and it retries if the
    server is busy.
    """
    from orchestrator.client.client import connect

    names: list[str] = []

    def work() -> None:
        # Messages are discarded, because the user is typing.
        with suppress(Exception), connect(start=False, progress=lambda _: None) as client:
            names.extend(query(client))

    thread = Thread(target=work, name="completion", daemon=True)
    thread.start()
    thread.join(WAIT_S)
    return [name for name in names if SAFE_NAME.fullmatch(name)]
