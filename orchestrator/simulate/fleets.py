"""Fleets that need not exist: how many devices of each kind, on nodes of which size, and how those fail.

`v100=36,k80=36`, or a YAML file; `--faults` is a YAML file of how nodes fail alone.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cluster.errors import UserError, nearest
from orchestrator.simulate.fields import Fields
from orchestrator.simulate.rows import MOST_DIGITS

MOST_DEVICES = 1_000_000
"""Of a kind: what is decided takes memory for each device."""
MOST_H = 1e6
LEAST_H = 1e-3
CHECKPOINT_S, MOST_CHECKPOINT_S = 600.0, 1e7
HOUR_S = 3600.0
SUFFIXES = (".yaml", ".yml")
CHANCES = ("mtbf_h", "repair_h")
OF_FAILURES = ("seed", "checkpoint_every_s", "events")


@dataclass(frozen=True, slots=True)
class Nodes:
    """Of a kind: `size` devices each, the last node perhaps fewer. `mtbf_s` is how long a node is up on average until
    it fails; infinite where none fails by chance.
    """

    size: int = 1
    mtbf_s: float = math.inf
    repair_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Outage:
    """One that is sure: which kind and node, both by their numbers, from when to when."""

    kind: int
    node: int
    down_s: float
    up_s: float


@dataclass(frozen=True, slots=True)
class Failures:
    """`nodes` of each kind of the fleet. Jobs go on from the last checkpoint, of which there is one every
    `checkpoint_s` that a job makes progress.
    """

    nodes: tuple[Nodes, ...]
    outages: tuple[Outage, ...] = ()
    seed: int = 0
    checkpoint_s: float = CHECKPOINT_S

    @property
    def happen(self) -> bool:
        return bool(self.outages) or any(math.isfinite(nodes.mtbf_s) for nodes in self.nodes)


@dataclass(frozen=True, slots=True)
class Fleet:
    """`devices` (kinds,) counts those of each kind. `nodes` is None where it was not said what nodes there are."""

    kinds: tuple[str, ...]
    devices: NDArray[np.int64]
    nodes: Failures | None = None

    @property
    def failures(self) -> Failures | None:
        """None where no node ever fails."""
        return self.nodes if self.nodes and self.nodes.happen else None

    def sizes(self, kind: int) -> Iterator[int]:
        """How many devices each node of the kind has."""
        size, devices = self._size(kind), int(self.devices[kind])
        return (min(size, devices - first) for first in range(0, devices, size))

    def count(self, kind: int) -> int:
        """Nodes of the kind."""
        return -(-int(self.devices[kind]) // self._size(kind))

    def _size(self, kind: int) -> int:
        return self.nodes.nodes[kind].size if self.nodes else 1


def read_fleet(text: str) -> Fleet:
    """Of `kind=devices,kind=devices`, or of the YAML file of that name."""
    if text.endswith(SUFFIXES):
        return _of_file(Path(text))
    counts: dict[str, int] = {}
    for part in text.split(","):
        kind, equals, number = (word.strip() for word in part.partition("="))
        whole = number.isascii() and number.isdecimal() and len(number) <= MOST_DIGITS
        if not (kind and kind.isprintable() and equals and whole and 0 < int(number) <= MOST_DEVICES):
            raise UserError(
                f"--fleet: {part!r} is not kind=devices with 1 to {MOST_DEVICES} devices",
                "write it like v100=36,p100=36,k80=36, or name a .yaml file",
            )
        if kind in counts:
            raise UserError(f"--fleet: {kind} is named twice", f"write {kind} once, with all its devices")
        counts[kind] = int(number)
    return Fleet(tuple(counts), np.array(list(counts.values()), np.int64))


def with_faults(fleet: Fleet, path: Path) -> Fleet:
    """The fleet, failing as the file says; of what the file does not name, as it did."""
    given = Fields.of_file(path, ("nodes", *OF_FAILURES))
    before = fleet.nodes or Failures((Nodes(),) * len(fleet.kinds))
    nodes = dict(zip(fleet.kinds, before.nodes, strict=True))
    for kind, of_kind in given.inners("nodes", ("size", *CHANCES)) if "nodes" in given else ():
        number = _kind(given, f"nodes.{kind}", kind, fleet.kinds)
        most = int(fleet.devices[number])
        known = nodes[kind].size if fleet.nodes else None
        size = of_kind.whole("size", 1, most, known)
        if known not in (None, size):
            raise of_kind.wrong("size", f"the fleet's nodes of {kind} have {known} devices", f"write {known}")
        nodes[kind] = _nodes(of_kind, size)
    return _completed(fleet, replace(before, nodes=tuple(nodes.values())), given)


def _of_file(path: Path) -> Fleet:
    given = Fields.of_file(path, ("kinds", *OF_FAILURES))
    devices, nodes = {}, []
    for kind, of_kind in given.inners("kinds", ("nodes", "devices", *CHANCES)):
        if not (kind and kind.isprintable()):
            raise given.wrong("kinds", f"{kind!r} is not a name", "write the name of a kind, like v100")
        size = of_kind.whole("devices", 1, MOST_DEVICES)
        devices[kind] = size * of_kind.whole("nodes", 1, MOST_DEVICES // size)
        nodes.append(_nodes(of_kind, size))
    if not devices:
        raise given.wrong("kinds", "no kind is named", "write them like `v100: {nodes: 250, devices: 4}`")
    fleet = Fleet(tuple(devices), np.array(list(devices.values()), np.int64))
    return _completed(fleet, Failures(tuple(nodes)), given)


def _nodes(of_kind: Fields, size: int) -> Nodes:
    if not any(key in of_kind for key in CHANCES):
        return Nodes(size)
    return Nodes(size, *(of_kind.number(key, LEAST_H, MOST_H) * HOUR_S for key in CHANCES))


def _completed(fleet: Fleet, before: Failures, given: Fields) -> Fleet:
    """With nodes that fail as `before`, and the seed, the checkpoints and the outages of a file."""
    made = replace(fleet, nodes=before)
    failures = Failures(
        before.nodes,
        tuple(_outages(made, given)) if "events" in given else before.outages,
        given.whole("seed", 0, 1 << 62, before.seed),
        given.number("checkpoint_every_s", 1.0, MOST_CHECKPOINT_S, before.checkpoint_s),
    )
    return replace(made, nodes=failures)


def _outages(fleet: Fleet, given: Fields) -> Iterator[Outage]:
    for event in given.items("events", ("kind", "node", "down_h", "up_h")):
        kind = _kind(event, "kind", str(event.data.get("kind", "")), fleet.kinds)
        node = event.whole("node", 0, fleet.count(kind) - 1)
        down_h = event.number("down_h", 0.0, MOST_H)
        up_h = event.number("up_h", down_h + LEAST_H, 2 * MOST_H)
        yield Outage(kind, node, down_h * HOUR_S, up_h * HOUR_S)


def _kind(given: Fields, key: str, kind: str, kinds: tuple[str, ...]) -> int:
    if kind not in kinds:
        raise given.wrong(key, f"the fleet has no kind {kind!r}", nearest(kind, kinds))
    return kinds.index(kind)
