"""Load: choose a checkpoint, bring everything into memory verified and converted, and only then touch live objects."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cluster.errors import NotFound
from workers.checkpoint import xla
from workers.checkpoint.capture import kind_of
from workers.checkpoint.folders import newest_first, step_of
from workers.checkpoint.inspect import Latest, latest
from workers.checkpoint.manifest import NAME
from workers.checkpoint.modules import stage_modules
from workers.checkpoint.optimizer import stage_optimizer
from workers.checkpoint.policy import Policy
from workers.checkpoint.reader import Reader
from workers.checkpoint.report import Report
from workers.checkpoint.staging import Apply, Stage
from workers.checkpoint.values import check_kind, plain, stage_rng, stage_stateful, stage_tree
from workers.checkpoint.words import closest
from workers.errors import CheckpointError

ORDER = ("stateful", "module", "optimizer", "tree", "rng")
"""In which live objects are changed: foreign code, which alone may still fail, first; random state last."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """`state` has the live objects of `into` and, for other entries, plain values."""

    step: int
    state: dict[str, Any]
    report: Report


def load(
    root_or_path: str | os.PathLike[str],
    into: Mapping[str, Any] | None = None,
    *,
    step: "int | str" = "latest",
    device: "torch.device | str | None" = None,
    dtype: "str | Mapping[Any, Any]" = "keep",
    supported_dtypes: "Iterable[Any] | None" = None,
    on_lossy: str = "error",
) -> Loaded:
    """Load the newest sound checkpoint of a root, the one of a step, or the one at a path.

    Without `into` everything comes back as plain values, tensors on `device` (default: the CPU). `into` maps entries
    to live modules, optimizers, stateful objects, dicts or lists (filled anew), True for "rng", or None for a plain
    value. Modules keep their device and dtype, and a stored tensor of another dtype is converted. Plain entries that
    `into` does not name are returned too; other entries are left out and named in the report.

    `dtype`: "keep"; "native" converts what the device cannot hold; a mapping converts as it says. `on_lossy` is
    "error", "warn" or "allow" for conversions that change values. Raises CheckpointError before anything live changed.
    """
    policy = Policy(dtype, supported_dtypes, on_lossy)
    chosen = _choose(Path(root_or_path), step)
    with Reader(chosen.path) as reader:
        report = Report(str(chosen.path), reader.manifest.step, reader.manifest.producer, list(chosen.skipped))
        loading = _Loading(Stage(reader, policy, report, torch.device(device or "cpu")), into)
    policy.judge(report)
    loading.apply()
    return Loaded(report.step, loading.state, report)


class _Loading:
    """All entries staged: `state` is what load returns, `apply` changes the live objects in it."""

    def __init__(self, stage: Stage, into: Mapping[str, Any] | None):
        self._stage = stage
        self._entries = stage.reader.manifest.entries
        self._into = dict.fromkeys(self._entries) if into is None else into
        for name in self._into:
            if name not in self._entries:
                raise CheckpointError(f"the checkpoint has no entry {name!r}", closest(name, self._entries))
        self._live = stage_modules(stage, {n: live for n, live in self._into.items() if isinstance(live, nn.Module)})
        self._applies: dict[str, list[Apply]] = {kind: [] for kind in ORDER} | {"module": self._live.applies}
        self.state: dict[str, Any] = {}
        for name in self._entries:
            self._stage_entry(name)

    def apply(self) -> None:
        for kind in ORDER:
            if kind == "rng" and "xla" in self._live.device_types():
                xla.settle()  # it moves the device's random stream, so it comes before that is set
            for apply in self._applies[kind]:
                apply()

    def _stage_entry(self, name: str) -> None:
        live = self._into.get(name)
        if name not in self._into and self._entries[name].kind != "tree":
            self._stage.report.left_out.append(name)
            return
        self.state[name] = plain(self._stage, name) if live is None else live
        if live is not None:
            kind = kind_of(name, live)
            self._applies[kind] += self._staged(kind, name, live)

    def _staged(self, kind: str, name: str, live: Any) -> list[Apply]:
        check_kind(self._stage, name, kind, live)
        match kind:
            case "optimizer":
                return [stage_optimizer(self._stage, name, live, self._live)]
            case "stateful":
                return [stage_stateful(self._stage, name, live)]
            case "rng":
                return [stage_rng(self._stage, name, self._live.device_types())]
            case "tree":
                return [stage_tree(self._stage, name, live)]
        return []  # modules are staged together, for their ties


def _choose(path: Path, step: "int | str") -> Latest:
    if os.path.lexists(path / NAME):
        return Latest(path, step_of(path))
    if step == "latest":
        found = latest(path)
        if found is None:
            raise NotFound(f"no checkpoint in {path}", "save one first, or name another folder")
        return found
    folders = newest_first(path)
    chosen = next((folder for folder in folders if step_of(folder) == step), None)
    if chosen is None:
        steps = sorted({step_of(folder) for folder in folders})
        raise NotFound(f"no checkpoint of step {step} in {path}", f"there are: {', '.join(map(str, steps)) or 'none'}")
    return Latest(chosen, step_of(chosen))
