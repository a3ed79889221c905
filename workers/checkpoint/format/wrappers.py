"""Match names of tensors whose modules are wrapped differently: `module.`, `_orig_mod.`, `model.`, PEFT.

Wrappers stack in any order, and some wrap inner modules. A name is split at its dots into parts. All comparisons of
names use one search: it tries to remove every set of parts that wrappers may have added, and every prefix that all
names of one side share, until all names match. A part that may also be the model's own (`module`, `model`) is removed
only if that is needed.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from workers.checkpoint.format.message_text import first_names

NameParts = tuple[str, ...]
Names = Mapping[str, NameParts]
"""Maps each name to its parts, without those that were removed."""

RESERVED = frozenset((
    "_orig_mod", "_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module", "_forward_module",
))  # fmt: skip
"""Parts that are never a model's own: torch.compile, FSDP, FSDP before torch 1.12 and of torch-xla, checkpoint_wrapper,
Fabric.
"""
COMMON = (("base_model", "model"), ("module",), ("model",))
"""Parts of a wrapper or of the model: PEFT; data parallelism and DeepSpeed; Lightning modules. Longer ones first."""
MAX_PREFIX_PARTS = 16


@dataclass(frozen=True, slots=True)
class Fit:
    """A match. `names` maps each name of one side to the other's. `stripped` describes what was removed, "" for
    nothing.
    """

    names: dict[str, str]
    stripped: str


class AmbiguousNamesError(ValueError):
    """Names match in several ways; the message names two matches of one tensor."""


def fit(
    names: Collection[str],
    targets: Mapping[str, Hashable],
    *,
    must_match_all: bool = True,
    sides: tuple[str, str] = ("stored", "live"),
) -> Fit | None:
    """Match `names` with `targets` after removing wrappers from either side; None if they do not match.

    `targets` maps each name of the other side to the object that has it: two names of one object are a tie. All `names`
    must match, no two alike, and with `must_match_all` each object must get a name. `sides` names both sides in
    `Fit.stripped`, which is "" if the names are equal. Raises AmbiguousNamesError.
    """
    target_objects = set(targets.values())
    if all(name in targets for name in names) and (
        not must_match_all or {targets[name] for name in names} == target_objects
    ):
        return Fit({name: name for name in names}, "")
    first: Fit | None = None
    for pairs, left, right in _all_matches(names, targets):
        if must_match_all and {targets[name] for name in pairs.values()} != target_objects:
            continue
        if first is None:
            first = Fit(pairs, _sentence(pairs, left, right, sides))
        elif name := next((n for n in names if targets[first.names[n]] != targets[pairs[n]]), ""):
            raise AmbiguousNamesError(f"{name} could be {first.names[name]} or {pairs[name]}")
    return first


def without_wrappers(name: str) -> str:
    """Remove wrappers from one name, except for `model.`, which may be the model's own."""
    return ".".join(_without(name, (("module",),)))


def _all_matches(
    names: Collection[str], targets: Mapping[str, Hashable]
) -> Iterator[tuple[dict[str, str], Names, Names]]:
    """Yield every match of all names, with the remaining parts of each side, least removed first."""
    for units in _wrapper_sets((*names, *targets)):
        left, right = ({name: _without(name, units) for name in side} for side in (names, targets))
        if len(set(left.values())) < len(left):
            continue
        cuts = [(0, 0), *((i, 0) for i in _prefixes(left)), *((0, i) for i in _prefixes(right))]
        for left_cut, right_cut in cuts:
            if pairs := _pair_names(left, left_cut, right, right_cut, targets):
                yield pairs, _cut(left, left_cut), _cut(right, right_cut)


def _wrapper_sets(names: Collection[str]) -> Iterator[tuple[NameParts, ...]]:
    """Yield sets of parts to remove as wrappers: only parts that occur, smaller sets first."""
    present = {part for name in names for part in name.split(".")}
    units = [unit for unit in COMMON if present.issuperset(unit)]
    for count in range(len(units) + 1):
        yield from combinations(units, count)


def _without(name: str, units: tuple[NameParts, ...]) -> NameParts:
    """Split a name into parts, without RESERVED ones and `units`. The last part is the tensor's own and stays."""
    *above, last = name.split(".")
    parts = tuple(part for part in above if part not in RESERVED)
    for unit in units:
        parts = _cut_out(parts, unit)
    return (*parts, last)


def _cut_out(parts: NameParts, unit: NameParts) -> NameParts:
    """Remove each occurrence of the run `unit`."""
    remaining: list[str] = []
    index = 0
    while index < len(parts):
        if parts[index : index + len(unit)] == unit:
            index += len(unit)
        else:
            remaining.append(parts[index])
            index += 1
    return tuple(remaining)


def _prefixes(side: Names) -> range:
    """Return the possible lengths of a prefix to remove: up to the number of parts that all names of a side share."""
    names = list(side.values())
    shortest = min((len(parts) for parts in names), default=1)
    same = 0
    while same < min(shortest - 1, MAX_PREFIX_PARTS) and all(parts[same] == names[0][same] for parts in names):
        same += 1
    return range(1, same + 1)


def _cut(side: Names, count: int) -> Names:
    return {name: path[count:] for name, path in side.items()} if count else side


def _pair_names(
    left: Names, left_cut: int, right: Names, right_cut: int, targets: Mapping[str, Hashable]
) -> dict[str, str] | None:
    """Pair names with equal parts after the cuts; None if one has no partner, or a partner is ambiguous."""
    by_parts: dict[NameParts, str] = {}
    for name, parts in right.items():
        if targets[by_parts.setdefault(parts[right_cut:], name)] != targets[name]:
            return None
    pairs: dict[str, str] = {}
    for name, parts in left.items():
        partner = by_parts.get(parts[left_cut:])
        if partner is None:
            return None
        pairs[name] = partner
    return pairs


def _sentence(pairs: dict[str, str], left: Names, right: Names, sides: tuple[str, str]) -> str:
    """Describe what was removed from either side, with one pair of names as an example."""
    removed = [
        f"stripped {first_names(runs, ' and ')} from the {side} names"
        for side, names in zip(sides, (left, right), strict=True)
        if (runs := _removed_runs(names))
    ]
    example = next((f": {a} is {b}" for a, b in pairs.items() if a != b), "")
    return ", and ".join(removed) + example


def _removed_runs(names: Names) -> list[str]:
    """List the runs of parts that were removed, such as `model._orig_mod.`, the most frequent first."""
    runs: Counter[str] = Counter()
    for name, parts in names.items():
        remaining, run = list(parts), ""
        for part in reversed(name.split(".")):
            if remaining and part == remaining[-1]:
                remaining.pop()
                runs[run] += 1
                run = ""
            else:
                run = f"{part}.{run}"
        runs[run] += 1
    del runs[""]
    return [run for run, _ in runs.most_common()]
