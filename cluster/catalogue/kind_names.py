"""From the words people write to back ends and kinds.

Words are compared in any case, and `-`, `_`, `.` and spaces do not count: `RTX-4090`, `rtx4090` and `RTX 4090` are one.
"""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType

from cluster.catalogue.lookup import model
from cluster.catalogue.tables import (
    DeviceModel,
    Vendor,
    builtin_models,
    builtin_vendors,
    models,
    normalized_word,
    vendors,
)
from cluster.errors import UserError, nearest

EMULATED = "emulated"
"""A device of one of these models computes on the CPU: asked for by its full name or its pool, never by `any` or by
its backend."""

CPU_TIER = "cpu"
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
"""What discovery may call a model, and a job may ask for: MIG profiles have `+me`, `+gfx` and `.me`."""
LONGEST_NAME = 128
OF_MODEL = re.compile(r"(-\d+gb)?(-mig-.+)?")
"""What may follow a model's name in a kind of it: a size of memory, a slice."""

Spelling = tuple[str, str, tuple[str, ...]]
"""Back end, word, and the patterns it means."""


@cache
def _own_words() -> dict[str, str]:
    """Names and aliases of our own vendors: most words are among them, and nobody waits for those from outside."""
    return {word: row.backend for row in builtin_vendors().values() for word in (row.backend, *row.aliases)}


@cache
def aliases() -> Mapping[str, str]:
    return MappingProxyType({alias: row.backend for row in vendors().values() for alias in row.aliases})


def is_backend(word: str) -> bool:
    """A name or an alias, in any case. Words for our models are none, and nobody looks outside for them."""
    name = word.lower()
    if name in _own_words() or ("", normalized_word(word)) in _index(ours=True):
        return name in _own_words()
    return name in vendors() or name in aliases()


def backend_name(word: str) -> str:
    """The back end for a name or an alias, in any case. Raises UserError naming the nearest."""
    name = word.lower()
    if name in _own_words():
        return _own_words()[name]
    name = aliases().get(name, name)
    if name not in vendors():
        raise UserError(f"unknown backend {word!r}", nearest(word.lower(), [*vendors(), *aliases()]))
    return name


def vendor(word: str) -> Vendor:
    """The row of a back end, by name or alias. Raises UserError naming the nearest."""
    return builtin_vendors().get(word) or vendors()[backend_name(word)]


def ray_resource(backend: str, emulated: bool) -> str:
    """The Ray resource that backs a reservation of one device: an emulated device is counted as the CPU it is."""
    return "CPU" if emulated else vendor(backend).ray_resource


def matches_pattern(pattern: str, kind: str) -> bool:
    """Whether a device of `kind` is one of `pattern`: equal in any case, the back end alone, or the model in any size:
    `nvidia:H100` takes `nvidia:H100-80GB`.
    """
    wanted, have = pattern.lower(), kind.lower()
    if ":" not in wanted:
        return have.partition(":")[0] == (_own_words().get(wanted) or aliases().get(wanted, wanted))
    return have.startswith(wanted) and bool(OF_MODEL.fullmatch(have[len(wanted) :]))


def model_name(text: str) -> str:
    """What a driver calls a model, as a kind can hold it and people can type it: no word for a number of devices."""
    name = re.sub(r"[^A-Za-z0-9._+]+", "-", text).strip("-._+")[:64]
    return name if re.search("[A-Za-z]", name) else f"GPU-{name}".rstrip("-")


def resolve_name(word: str, backend: str = "") -> tuple[str, ...]:
    """The kinds, or patterns of kinds, that a model's name means: `a100` all sizes of it, `A100-80GB` one; () where
    nobody knows it. Without `backend`, only words that are of one back end alone.

    Names that vendors' tools print are words, too: `NVIDIA A100-SXM4-40GB`. What follows a known model
    (`H100-80GB-MIG-1g.10gb`, or a size that is not listed) stays as it is written.
    """
    name = backend and backend_name(backend)
    if len(word) > LONGEST_NAME:
        return ()
    if found := _meant(name, word):
        return found
    pieces = word.split("-")
    for cut in range(len(pieces) - 1, 0, -1):
        rest = "-".join(pieces[cut:])
        known = _meant(name, "-".join(pieces[:cut])) if OF_MODEL.fullmatch(f"-{rest}".lower()) else ()
        if known:
            return tuple(_with(pattern, rest) for pattern in known)
    return ()


def _with(pattern: str, rest: str) -> str:
    """`RTX4090-24GB` is the RTX4090: it is sold with that size only."""
    row = model(pattern)
    size = row and row.devices_per_card == 1 and (row.memory_gib or row.memory_gb)
    return pattern if size and rest.lower() == f"{round(size)}gb" else f"{pattern}-{rest}"


def _meant(backend: str, word: str) -> tuple[str, ...]:
    """What a word of ours means is never asked of other distributions, whose search costs a command 10 ms."""
    key = (backend, normalized_word(word))
    found = _index(ours=True).get(key, ())
    return found if found or backend in builtin_vendors() else _index(ours=False).get(key, ())


@cache
def _index(ours: bool) -> dict[tuple[str, str], tuple[str, ...]]:
    """(back end, folded word) -> patterns; with the back end "" for words that one back end alone has.

    A family's name comes before a size of it, and that before other spellings.
    """
    rows = (builtin_models() if ours else models()).values()
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for spellings in (_families(rows), _kinds(rows), _others(rows)):
        for backend, word, patterns in spellings:
            found.setdefault((backend, normalized_word(word)), patterns)
    of: dict[str, list[str]] = {}
    for backend, word in found:
        of.setdefault(word, []).append(backend)
    on_cpus = {normalized_word(row.model) for row in rows if row.tier == CPU_TIER}
    alone = {word: backends[0] for word, backends in of.items() if len(backends) == 1 and word not in on_cpus}
    return found | {("", word): found[backend, word] for word, backend in alone.items()}


def _families(rows: Iterable[DeviceModel]) -> Iterable[Spelling]:
    """Where a model is more than sizes (Apple's M4, M4-Pro and M4-Max), its other kinds are told one by one."""
    families: dict[str, list[DeviceModel]] = {}
    for row in rows:
        families.setdefault(row.family, []).append(row)
    for family, of_it in families.items():
        others = [row.kind for row in of_it if not matches_pattern(family, row.kind)]
        yield of_it[0].backend, of_it[0].model, (*([family] if len(others) < len(of_it) else []), *others)


def _kinds(rows: Iterable[DeviceModel]) -> Iterable[Spelling]:
    for row in rows:
        yield row.backend, row.kind.partition(":")[2], (row.kind,)


def _others(rows: Iterable[DeviceModel]) -> Iterable[Spelling]:
    """A word that several sizes of a model share means all of them."""
    meant: dict[tuple[str, str], list[DeviceModel]] = {}
    for row in rows:
        for word in dict.fromkeys(map(normalized_word, (*row.spellings, *row.tool_names))):
            meant.setdefault((row.backend, word), []).append(row)
    for (backend, word), of_it in meant.items():
        yield backend, word, tuple(row.kind for row in of_it)


def kind_spellings() -> list[str]:
    """Models that may stand alone, as the rows write them."""
    return list(dict.fromkeys(row.model for row in models().values() if row.tier != CPU_TIER))


def require_known_kind(word: str) -> str:
    """A back end, a model in all its sizes, or a kind, in the catalogue's spelling: `cuda:a100-80gb`, `H100`, `tpu`.

    Raises UserError naming the nearest for a model nobody lists, and for one on which nothing computes.
    """
    first, colon, rest = word.partition(":")
    if not colon and is_backend(first):
        return backend_name(first)
    backend = backend_name(first) if colon else ""
    found = resolve_name(rest if colon else first, backend)
    if not found and (not colon or any(row.backend == backend for row in models().values())):
        raise UserError(f"unknown kind {word!r}", _nearest_kind(rest if colon else first, backend))
    kind = found[0] if found else f"{backend}:{rest}"
    card = model(kind)
    if card is not None and card.unavailable:
        raise UserError(f"no back end computes on {kind}", card.unavailable)
    return kind


def _nearest_kind(word: str, backend: str) -> str:
    """Among the models of the back end, else of all; those that are spelled nearest."""
    rows = [row for row in models().values() if backend in ("", row.backend) and ":" in row.kind]
    names = {normalized_word(row.kind.partition(":")[2]): row.kind for row in rows}
    names |= {normalized_word(row.model): row.family for row in rows}
    names |= {} if backend else {name: name for name in (*vendors(), *aliases())}
    close = [names[name] for name in get_close_matches(normalized_word(word), list(names), n=4, cutoff=0.3)]
    if not close:
        return f"known are, among others, {', '.join(list(dict.fromkeys(names.values()))[:8])}"
    return f"did you mean {close[0]!r}? near: {', '.join(close)}"
