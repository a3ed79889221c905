"""Fleets to simulate: number of devices of each kind, size of nodes, and how nodes fail.

Written as `v100=36,k80=36` or as a YAML file. `--faults` names a YAML file with only the failures of nodes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cluster.errors import UserError, nearest
from orchestrator.simulation.fields import YamlFields
from orchestrator.simulation.rows import MAX_DIGITS

MAX_DEVICES = 1_000_000
"""Maximum number of devices of a kind: a decision needs memory for each."""
MAX_HOURS = 1e6
MIN_HOURS = 1e-3
CHECKPOINT_S, MAX_CHECKPOINT_S = 600.0, 1e7
HOUR_S = 3600.0
SUFFIXES = (".yaml", ".yml")
CHANCES = ("mtbf_h", "repair_h")
FAILURE_KEYS = ("seed", "checkpoint_every_s", "events")


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of a kind, with `size` devices each; the last node may have fewer.

    `mtbf_s`: mean time until a node fails, infinite if none fails by chance. `repair_s`: mean time until it is back.
    """

    size: int = 1
    mtbf_s: float = math.inf
    repair_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Outage:
    """A scheduled outage of a node, identified by the numbers of its kind and node."""

    kind: int
    node: int
    down_s: float
    up_s: float


@dataclass(frozen=True, slots=True)
class Failures:
    """Nodes of each kind, and their failures. Jobs resume from their last checkpoint.

    `checkpoint_s`: seconds of progress between two checkpoints of a job.
    """

    nodes: tuple[Nodes, ...]
    outages: tuple[Outage, ...] = ()
    seed: int = 0
    checkpoint_s: float = CHECKPOINT_S

    @property
    def is_any(self) -> bool:
        return bool(self.outages) or any(math.isfinite(nodes.mtbf_s) for nodes in self.nodes)


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet. `devices` (kinds,): number of each kind. `nodes`: None if no nodes were declared."""

    kinds: tuple[str, ...]
    devices: NDArray[np.int64]
    nodes: Failures | None = None

    @property
    def failures(self) -> Failures | None:
        """The failures of nodes, None if no node ever fails."""
        return self.nodes if self.nodes and self.nodes.is_any else None

    def sizes(self, kind: int) -> Iterator[int]:
        """Number of devices of each node of the kind."""
        size, devices = self._size(kind), int(self.devices[kind])
        return (min(size, devices - first) for first in range(0, devices, size))

    def count(self, kind: int) -> int:
        """Number of nodes of the kind."""
        return -(-int(self.devices[kind]) // self._size(kind))

    def _size(self, kind: int) -> int:
        return self.nodes.nodes[kind].size if self.nodes else 1


def read_fleet(text: str) -> Fleet:
    """Read a fleet from `kind=devices,kind=devices` or from the YAML file with that name.

    Raises UserError.
    """
    if text.endswith(SUFFIXES):
        return _read_file(Path(text))
    counts: dict[str, int] = {}
    for part in text.split(","):
        kind, equals, number = (piece.strip() for piece in part.partition("="))
        is_integer = number.isascii() and number.isdecimal() and len(number) <= MAX_DIGITS
        if not (kind and kind.isprintable() and equals and is_integer and 0 < int(number) <= MAX_DEVICES):
            raise UserError(
                f"--fleet: {part!r} is not kind=devices with 1 to {MAX_DEVICES} devices",
                "write it like v100=36,p100=36,k80=36, or name a .yaml file",
            )
        if kind in counts:
            raise UserError(f"--fleet: {kind} is named twice", f"write {kind} once, with all its devices")
        counts[kind] = int(number)
    return Fleet(tuple(counts), np.array(list(counts.values()), np.int64))


def add_failures(fleet: Fleet, path: Path) -> Fleet:
    """Give the fleet the failures in a file.

    Kinds and settings that the file does not contain are unchanged.
    """
    file = YamlFields.of_file(path, ("nodes", *FAILURE_KEYS))
    current = fleet.nodes or Failures((Nodes(),) * len(fleet.kinds))
    nodes = dict(zip(fleet.kinds, current.nodes, strict=True))
    for kind, fields in file.mappings("nodes", ("size", *CHANCES)) if "nodes" in file else ():
        number = _kind(file, f"nodes.{kind}", kind, fleet.kinds)
        maximum = int(fleet.devices[number])
        declared_size = nodes[kind].size if fleet.nodes else None
        size = fields.integer("size", 1, maximum, declared_size)
        if declared_size not in (None, size):
            raise fields.error(
                "size", f"the fleet's nodes of {kind} have {declared_size} devices", f"write {declared_size}"
            )
        nodes[kind] = _nodes(fields, size)
    return _complete(fleet, replace(current, nodes=tuple(nodes.values())), file)


def _read_file(path: Path) -> Fleet:
    file = YamlFields.of_file(path, ("kinds", *FAILURE_KEYS))
    devices, nodes = {}, []
    for kind, fields in file.mappings("kinds", ("nodes", "devices", *CHANCES)):
        if not (kind and kind.isprintable()):
            raise file.error("kinds", f"{kind!r} is not a name", "write the name of a kind, like v100")
        size = fields.integer("devices", 1, MAX_DEVICES)
        devices[kind] = size * fields.integer("nodes", 1, MAX_DEVICES // size)
        nodes.append(_nodes(fields, size))
    if not devices:
        raise file.error("kinds", "no kind is named", "write kinds like `v100: {nodes: 250, devices: 4}`")
    fleet = Fleet(tuple(devices), np.array(list(devices.values()), np.int64))
    return _complete(fleet, Failures(tuple(nodes)), file)


def _nodes(fields: YamlFields, size: int) -> Nodes:
    if not any(key in fields for key in CHANCES):
        return Nodes(size)
    return Nodes(size, *(fields.number(key, MIN_HOURS, MAX_HOURS) * HOUR_S for key in CHANCES))


def _complete(fleet: Fleet, failures_before: Failures, file: YamlFields) -> Fleet:
    """Complete a fleet with the nodes in `failures_before`, and the seed and outages in a file."""
    with_nodes = replace(fleet, nodes=failures_before)
    failures = Failures(
        failures_before.nodes,
        tuple(_outages(with_nodes, file)) if "events" in file else failures_before.outages,
        file.integer("seed", 0, 1 << 62, failures_before.seed),
        file.number("checkpoint_every_s", 1.0, MAX_CHECKPOINT_S, failures_before.checkpoint_s),
    )
    return replace(with_nodes, nodes=failures)


def _outages(fleet: Fleet, file: YamlFields) -> Iterator[Outage]:
    for event in file.items("events", ("kind", "node", "down_h", "up_h")):
        kind = _kind(event, "kind", str(event.data.get("kind", "")), fleet.kinds)
        node = event.integer("node", 0, fleet.count(kind) - 1)
        down_h = event.number("down_h", 0.0, MAX_HOURS)
        up_h = event.number("up_h", down_h + MIN_HOURS, 2 * MAX_HOURS)
        yield Outage(kind, node, down_h * HOUR_S, up_h * HOUR_S)


def _kind(fields: YamlFields, key: str, kind: str, kinds: tuple[str, ...]) -> int:
    if kind not in kinds:
        raise fields.error(key, f"the fleet has no kind {kind!r}", nearest(kind, kinds))
    return kinds.index(kind)
