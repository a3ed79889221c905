"""Resolve the names that people write to back ends and kinds.

Names are compared without case, `-`, `_`, `.` and spaces: `RTX-4090`, `rtx4090` and `RTX 4090` are the same.
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
    normalize_name,
    vendors,
)
from cluster.errors import UserError, nearest

EMULATED = "emulated"
"""Model name of devices that compute on the CPU. A job gets one only by its full name or its pool, never by `any` or by
its backend."""

CPU_TIER = "cpu"
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
"""Valid model names, for discovery and jobs. MIG profiles have `+me`, `+gfx` and `.me`."""
MAX_NAME_LENGTH = 128
KIND_SUFFIX = re.compile(r"(-\d+gb)?(-mig-.+)?")
"""Suffix of a model's name in a kind: a memory size, a slice."""

Spelling = tuple[str, str, tuple[str, ...]]
"""Back end, name, and the patterns that the name means."""


@cache
def _builtin_backend_names() -> dict[str, str]:
    """Return the names and aliases of the built-in vendors.

    Most names are among them, so that plugins need not be loaded.
    """
    return {name: row.backend for row in builtin_vendors().values() for name in (row.backend, *row.aliases)}


@cache
def aliases() -> Mapping[str, str]:
    return MappingProxyType({alias: row.backend for row in vendors().values() for alias in row.aliases})


def is_backend(name: str) -> bool:
    """Return whether `name` is the name or an alias of a back end, in any case.

    Names of built-in models are not, and are decided without loading plugins.
    """
    lowered = name.lower()
    if lowered in _builtin_backend_names() or ("", normalize_name(name)) in _index(builtin_only=True):
        return lowered in _builtin_backend_names()
    return lowered in vendors() or lowered in aliases()


def backend_name(name: str) -> str:
    """Return the back end for a name or an alias, in any case. Raises UserError naming the nearest."""
    lowered = name.lower()
    if lowered in _builtin_backend_names():
        return _builtin_backend_names()[lowered]
    lowered = aliases().get(lowered, lowered)
    if lowered not in vendors():
        raise UserError(f"unknown backend {name!r}", nearest(name.lower(), [*vendors(), *aliases()]))
    return lowered


def vendor(name: str) -> Vendor:
    """Return the row of a back end, by name or alias. Raises UserError naming the nearest."""
    return builtin_vendors().get(name) or vendors()[backend_name(name)]


def ray_resource(backend: str, emulated: bool) -> str:
    """Return the Ray resource that is reserved for one device. An emulated device counts as a CPU."""
    return "CPU" if emulated else vendor(backend).ray_resource


def matches_pattern(pattern: str, kind: str) -> bool:
    """Return whether `kind` matches `pattern`: a kind in any case, a back end, or a model in any size.

    `nvidia:H100` matches `nvidia:H100-80GB`.
    """
    requested, actual = pattern.lower(), kind.lower()
    if ":" not in requested:
        return actual.partition(":")[0] == (
            _builtin_backend_names().get(requested) or aliases().get(requested, requested)
        )
    return actual.startswith(requested) and bool(KIND_SUFFIX.fullmatch(actual[len(requested) :]))


def model_name(text: str) -> str:
    """Turn a driver's name of a model into a valid one, which cannot be read as a number of devices."""
    name = re.sub(r"[^A-Za-z0-9._+]+", "-", text).strip("-._+")[:64]
    return name if re.search("[A-Za-z]", name) else f"GPU-{name}".rstrip("-")


def resolve_name(name: str, backend: str = "") -> tuple[str, ...]:
    """Return the kinds, or patterns of kinds, that a model's name means; () if it is unknown.

    `a100` means all its sizes, `A100-80GB` one. Names that vendors' tools print are accepted too, such as
    `NVIDIA A100-SXM4-40GB`. A suffix of a listed model (`H100-80GB-MIG-1g.10gb`, or a size that is not listed) stays
    as written. Without `backend`, only names that belong to one back end alone are resolved.
    """
    canonical_backend = backend and backend_name(backend)
    if len(name) > MAX_NAME_LENGTH:
        return ()
    if patterns := _patterns_of(canonical_backend, name):
        return patterns
    pieces = name.split("-")
    for split_at in range(len(pieces) - 1, 0, -1):
        suffix = "-".join(pieces[split_at:])
        base_patterns = (
            _patterns_of(canonical_backend, "-".join(pieces[:split_at]))
            if KIND_SUFFIX.fullmatch(f"-{suffix}".lower())
            else ()
        )
        if base_patterns:
            return tuple(_with_suffix(pattern, suffix) for pattern in base_patterns)
    return ()


def _with_suffix(pattern: str, suffix: str) -> str:
    """Append a suffix to a pattern. `RTX4090-24GB` is the RTX4090, which is sold with that size only."""
    row = model(pattern)
    size = row and row.devices_per_card == 1 and (row.memory_gib or row.memory_gb)
    return pattern if size and suffix.lower() == f"{round(size)}gb" else f"{pattern}-{suffix}"


def _patterns_of(backend: str, name: str) -> tuple[str, ...]:
    """Return the patterns that a name means.

    Plugins are searched only for names that we do not have: 10 ms.
    """
    key = (backend, normalize_name(name))
    patterns = _index(builtin_only=True).get(key, ())
    return patterns if patterns or backend in builtin_vendors() else _index(builtin_only=False).get(key, ())


@cache
def _index(builtin_only: bool) -> dict[tuple[str, str], tuple[str, ...]]:
    """Map (back end, normalized name) to patterns.

    The back end is "" for names that only one back end has.

    A family's name precedes a size of it, and a size precedes other spellings.
    """
    rows = (builtin_models() if builtin_only else models()).values()
    patterns_by_name: dict[tuple[str, str], tuple[str, ...]] = {}
    for spellings in (_families(rows), _kinds(rows), _other_spellings(rows)):
        for backend, name, patterns in spellings:
            patterns_by_name.setdefault((backend, normalize_name(name)), patterns)
    by_name: dict[str, list[str]] = {}
    for backend, name in patterns_by_name:
        by_name.setdefault(name, []).append(backend)
    cpu_models = {normalize_name(row.model) for row in rows if row.tier == CPU_TIER}
    unique = {name: backends[0] for name, backends in by_name.items() if len(backends) == 1 and name not in cpu_models}
    return patterns_by_name | {("", name): patterns_by_name[backend, name] for name, backend in unique.items()}


def _families(rows: Iterable[DeviceModel]) -> Iterable[Spelling]:
    """Yield the models' names.

    Kinds of a family that are not sizes of it (Apple's M4-Pro) are listed one by one.
    """
    families: dict[str, list[DeviceModel]] = {}
    for row in rows:
        families.setdefault(row.family, []).append(row)
    for family, members in families.items():
        other_kinds = [row.kind for row in members if not matches_pattern(family, row.kind)]
        yield (
            members[0].backend,
            members[0].model,
            (*([family] if len(other_kinds) < len(members) else []), *other_kinds),
        )


def _kinds(rows: Iterable[DeviceModel]) -> Iterable[Spelling]:
    for row in rows:
        yield row.backend, row.kind.partition(":")[2], (row.kind,)


def _other_spellings(rows: Iterable[DeviceModel]) -> Iterable[Spelling]:
    """Yield other spellings. One that several sizes of a model share means all of them."""
    rows_by_spelling: dict[tuple[str, str], list[DeviceModel]] = {}
    for row in rows:
        for spelling in dict.fromkeys(map(normalize_name, (*row.spellings, *row.tool_names))):
            rows_by_spelling.setdefault((row.backend, spelling), []).append(row)
    for (backend, spelling), members in rows_by_spelling.items():
        yield backend, spelling, tuple(row.kind for row in members)


def kind_spellings() -> list[str]:
    """Return the models that may be named without their back end, in the catalogue's spelling."""
    return list(dict.fromkeys(row.model for row in models().values() if row.tier != CPU_TIER))


def resolve_kind(name: str) -> str:
    """Return the catalogue's spelling of a back end, model or kind, e.g. `cuda:a100-80gb` or `tpu`.

    Raises UserError for an unknown model, naming the nearest, and for one on which no back end computes.
    """
    first, colon, rest = name.partition(":")
    if not colon and is_backend(first):
        return backend_name(first)
    backend = backend_name(first) if colon else ""
    kinds = resolve_name(rest if colon else first, backend)
    if not kinds and (not colon or any(row.backend == backend for row in models().values())):
        raise UserError(f"unknown kind {name!r}", _nearest_kind(rest if colon else first, backend))
    kind = kinds[0] if kinds else f"{backend}:{rest}"
    card = model(kind)
    if card is not None and card.unavailable:
        raise UserError(f"no back end computes on {kind}", card.unavailable)
    return kind


def _nearest_kind(text: str, backend: str) -> str:
    """Return a remedy with the nearest spelled models of the back end, or of all."""
    rows = [row for row in models().values() if backend in ("", row.backend) and ":" in row.kind]
    names = {normalize_name(row.kind.partition(":")[2]): row.kind for row in rows}
    names |= {normalize_name(row.model): row.family for row in rows}
    names |= {} if backend else {name: name for name in (*vendors(), *aliases())}
    close = [names[name] for name in get_close_matches(normalize_name(text), list(names), n=4, cutoff=0.3)]
    if not close:
        return f"choose a kind, e.g. {', '.join(list(dict.fromkeys(names.values()))[:8])}"
    return f"did you mean {close[0]!r}? near: {', '.join(close)}"
