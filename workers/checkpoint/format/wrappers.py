"""Names of tensors past what other libraries wrap around a module: `module.`, `_orig_mod.`, Lightning's `model.`, PEFT.

Wrappers stack in any order, and some are put around inner modules. One search serves all that compares names: of every
set of words that may be a wrapper's, and of the words that all names of one side begin with, it takes off what makes
every name fit. A word that could be the model's own (`module`, `model`) is taken off only for that.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from workers.checkpoint.format.message_text import first_names

Words = tuple[str, ...]
Names = Mapping[str, Words]
"""What is kept of each name."""

RESERVED = frozenset((
    "_orig_mod", "_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module", "_forward_module",
))  # fmt: skip
"""Never a model's own: torch.compile, FSDP, FSDP before torch 1.12 and of torch-xla, checkpoint_wrapper, Fabric."""
COMMON = (("base_model", "model"), ("module",), ("model",))
"""A wrapper's or the model's own: PEFT; data parallelism and DeepSpeed; Lightning modules. The longer one first."""
MAX_PREFIX_WORDS = 16


@dataclass(frozen=True, slots=True)
class Fit:
    """`names`: each name of one side -> that of the other. `stripped` says what it took, "" where that is nothing."""

    names: dict[str, str]
    stripped: str


class AmbiguousNamesError(ValueError):
    """Names fit in several ways that differ; the text says how for one of them."""


def fit(
    names: Collection[str],
    places: Mapping[str, Hashable],
    *,
    every_place: bool = True,
    sides: tuple[str, str] = ("stored", "live"),
) -> Fit | None:
    """How `names` are those of `places` once wrappers are stripped on either side; None where they are not.

    `places` has for each name of the other side what bears it: two names of one thing are a tie. All `names` must fit,
    no two of them alike, and with `every_place` each thing must get a name. `sides` are their words in the sentence,
    which is "" where names are equal. Raises AmbiguousNamesError.
    """
    things = set(places.values())
    if all(name in places for name in names) and (not every_place or {places[name] for name in names} == things):
        return Fit({name: name for name in names}, "")
    first: Fit | None = None
    for made, left, right in _fits(names, places):
        if every_place and {places[name] for name in made.values()} != things:
            continue
        if first is None:
            first = Fit(made, _sentence(made, left, right, sides))
        elif name := next((n for n in names if places[first.names[n]] != places[made[n]]), ""):
            raise AmbiguousNamesError(f"{name} could be {first.names[name]} or {made[name]}")
    return first


def without_wrappers(name: str) -> str:
    """The name as the plain model has it, as far as one name alone can tell: `model` may be the model's own."""
    return ".".join(_without(name, (("module",),)))


def _fits(names: Collection[str], places: Mapping[str, Hashable]) -> Iterator[tuple[dict[str, str], Names, Names]]:
    """Every way in which all names fit, the one that strips least first, with what either side keeps of its names."""
    for units in _choices((*names, *places)):
        left, right = ({name: _without(name, units) for name in side} for side in (names, places))
        if len(set(left.values())) < len(left):
            continue
        cuts = [(0, 0), *((i, 0) for i in _prefixes(left)), *((0, i) for i in _prefixes(right))]
        for left_cut, right_cut in cuts:
            if made := _paired(left, left_cut, right, right_cut, places):
                yield made, _cut(left, left_cut), _cut(right, right_cut)


def _choices(names: Collection[str]) -> Iterator[tuple[Words, ...]]:
    """Sets of words that are taken for wrappers: of those that occur at all, and few before many."""
    present = {word for name in names for word in name.split(".")}
    units = [unit for unit in COMMON if present.issuperset(unit)]
    for count in range(len(units) + 1):
        yield from combinations(units, count)


def _without(name: str, units: tuple[Words, ...]) -> Words:
    """The words of a name without reserved words and `units`. The last one is a tensor's and always stays."""
    *above, last = name.split(".")
    words = tuple(word for word in above if word not in RESERVED)
    for unit in units:
        words = _cut_out(words, unit)
    return (*words, last)


def _cut_out(words: Words, unit: Words) -> Words:
    kept: list[str] = []
    at = 0
    while at < len(words):
        if words[at : at + len(unit)] == unit:
            at += len(unit)
        else:
            kept.append(words[at])
            at += 1
    return tuple(kept)


def _prefixes(side: Names) -> range:
    """How many words all names of a side begin with, so that as many may be cut off."""
    names = list(side.values())
    shortest = min((len(words) for words in names), default=1)
    same = 0
    while same < min(shortest - 1, MAX_PREFIX_WORDS) and all(words[same] == names[0][same] for words in names):
        same += 1
    return range(1, same + 1)


def _cut(side: Names, words: int) -> Names:
    return {name: kept[words:] for name, kept in side.items()} if words else side


def _paired(
    left: Names, left_cut: int, right: Names, right_cut: int, places: Mapping[str, Hashable]
) -> dict[str, str] | None:
    """Names that are the same words after the cuts; None where one has no partner, or two that are different things."""
    by_words: dict[Words, str] = {}
    for name, words in right.items():
        if places[by_words.setdefault(words[right_cut:], name)] != places[name]:
            return None
    made: dict[str, str] = {}
    for name, words in left.items():
        partner = by_words.get(words[left_cut:])
        if partner is None:
            return None
        made[name] = partner
    return made


def _sentence(made: dict[str, str], left: Names, right: Names, sides: tuple[str, str]) -> str:
    """What is stripped from either side, and one pair of names as an example."""
    lost = [
        f"stripped {first_names(runs, ' and ')} from the {side} names"
        for side, kept in zip(sides, (left, right), strict=True)
        if (runs := _lost(kept))
    ]
    example = next((f": {a} is {b}" for a, b in made.items() if a != b), "")
    return ", and ".join(lost) + example


def _lost(kept: Names) -> list[str]:
    """The runs of words that names lost, such as `model._orig_mod.`, the most frequent first."""
    runs: Counter[str] = Counter()
    for name, words in kept.items():
        left, run = list(words), ""
        for word in reversed(name.split(".")):
            if left and word == left[-1]:
                left.pop()
                runs[run] += 1
                run = ""
            else:
                run = f"{word}.{run}"
        runs[run] += 1
    del runs[""]
    return [run for run, _ in runs.most_common()]
