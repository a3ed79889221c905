"""Load a checkpoint: choose it, check and verify everything, and only then change live objects."""

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cluster.errors import NotFound
from workers.checkpoint.conversion.dtype_policy import DtypePolicy
from workers.checkpoint.conversion.load_report import LoadReport, SkippedCheckpoint
from workers.checkpoint.disk.reader import CheckpointReader
from workers.checkpoint.format.manifest import NAME, DamagedCheckpoint
from workers.checkpoint.format.message_text import closest
from workers.checkpoint.format.step_folders import newest_first, step_of
from workers.checkpoint.loading.verifying_reader import VerifyingReader
from workers.checkpoint.state.capture import kind_of
from workers.checkpoint.state.load_stage import Apply, LoadStage
from workers.checkpoint.state.modules import stage_modules
from workers.checkpoint.state.optimizer import stage_optimizer
from workers.checkpoint.state.values import check_kind, plain_value, stage_rng, stage_stateful, stage_tree
from workers.checkpoint.tensors import xla
from workers.errors import CheckpointError

VERIFY = ("chunks", "full", "none", "once")
ORDER = ("stateful", "module", "optimizer", "tree", "rng")
"""Order in which live objects are changed: user code first, because only it may still fail; random state last."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of a load. `state` has the live objects of `into` and, for other entries, plain values."""

    step: int
    state: dict[str, Any]
    report: LoadReport


def load(
    root_or_path: str | os.PathLike[str],
    into: Mapping[str, Any] | None = None,
    *,
    step: "int | str" = "latest",
    device: "torch.device | str | None" = None,
    dtype: "str | Mapping[Any, Any] | Callable[[str, str], Any]" = "keep",
    supported_dtypes: "Iterable[Any] | None" = None,
    on_lossy: str = "error",
    verify: str = "chunks",
    rank: int = 0,
    progress: Progress | None = None,
) -> Loaded:
    """Load the newest sound checkpoint below a root, that of one step, or the one at a path.

    `root_or_path` may be the URI of an object store: the checkpoint is then copied to this machine first. Links are
    followed, both files that are links and links from a root to checkpoints.

    Without `into` everything is returned as plain values, tensors on `device` (default: the CPU). `into` maps entries
    to live modules, optimizers, stateful objects, dicts or lists (cleared and refilled), True for "rng", or None for a
    plain value. Modules keep their device and dtype, and a stored tensor of another dtype is converted. Optimizers
    match their parameters by name; imported ones without names by position, and then also without their modules. Plain
    entries that `into` does not name are returned too; other entries are left out and named in the report.

    `dtype`: "keep"; "native" converts what the device does not support; a mapping from dtypes or names (with `*`) to
    dtypes; or a function of name and stored dtype. `on_lossy` is "error", "warn" or "allow" for conversions that change
    values.
    `verify`: "chunks" verifies the hashes of all that is loaded, "full" of the complete checkpoint, "none" nothing.
    "once" verifies what "chunks" does, in one pass while it fills: if it raises, discard the objects in `into`.
    `rank` makes derived random streams differ between ranks. Raises CheckpointError before any live object changed
    (except with "once").
    """
    policy = DtypePolicy(dtype, supported_dtypes, on_lossy)
    if verify not in VERIFY:
        raise CheckpointError(f"verify is {verify!r}", f"use one of {', '.join(VERIFY)}")
    _wait_for_background_save(root_or_path)
    if "://" in str(root_or_path):
        from workers.checkpoint.transfer.object_store import download

        root_or_path = download(str(root_or_path), step)
    path = Path(root_or_path)
    if step != "latest" or os.path.lexists(path / NAME):
        return _load(_find_checkpoint(path, step), [], policy, into, device, verify, rank, progress)
    skipped: list[SkippedCheckpoint] = []
    for folder in newest_first(path, follow_links=True):
        try:
            return _load(folder, skipped, policy, into, device, verify, rank, progress)
        except DamagedCheckpoint as e:
            skipped.append(SkippedCheckpoint(str(folder), e.message))
    raise _none_sound(path, skipped)


def _load(
    folder: Path,
    skipped: list[SkippedCheckpoint],
    policy: DtypePolicy,
    into: Mapping[str, Any] | None,
    device: "torch.device | str | None",
    verify: str,
    rank: int,
    progress: Progress | None,
) -> Loaded:
    with (VerifyingReader if verify == "once" else CheckpointReader)(folder, follow=True) as reader:
        report = LoadReport(str(folder), reader.manifest.step, reader.manifest.producer, list(skipped))
        stage = LoadStage(reader, policy, report, torch.device(device or "cpu"))
        staged_load = _StagedLoad(stage, into, rank)
        stage.rescale()
        if verify in ("chunks", "full"):
            stage.verify_chunks(progress, everything=verify == "full")
        if policy.on_lossy == "error":
            stage.count_losses()
            reader.finish_verification()
            policy.check_losses(report)
        staged_load.apply(progress if verify == "once" else None)
    policy.check_losses(report)
    return Loaded(report.step, staged_load.state, report)


class _StagedLoad:
    """All entries, staged. `state` is the result of `load`; `apply` fills it and changes its live objects."""

    def __init__(self, stage: LoadStage, into: Mapping[str, Any] | None, rank: int):
        self._stage, self._rank = stage, rank
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

    def apply(self, progress: Progress | None = None) -> None:
        """Fill new tensors, then call user code (`load_state_dict`), which may still raise, then change live objects.
        Everything that user code gets is verified first.
        """
        on_bytes = _byte_counter(progress, self._stage.size_bytes())
        self._stage.fill_new(on_bytes)
        self._stage.reader.finish_verification()
        for kind in ORDER:
            if kind == "module":
                self._stage.fill_live(on_bytes)
                self._stage.reader.finish_verification()
            if kind == "rng" and "xla" in self._live.device_types():
                xla.wait_device_ops()  # these advance the device's random stream, so they end before it is set
            for apply in self._applies[kind]:
                apply()

    def _stage_entry(self, name: str) -> None:
        live = self._into.get(name)
        if name not in self._into and self._entries[name].kind != "tree":
            self._stage.report.left_out.append(name)
            return
        self.state[name] = plain_value(self._stage, name) if live is None else live
        if live is not None:
            kind = kind_of(name, live)
            self._applies[kind] += self._stage_live(kind, name, live)

    def _stage_live(self, kind: str, name: str, live: Any) -> list[Apply]:
        check_kind(self._stage, name, kind, live)
        match kind:
            case "optimizer":
                return [stage_optimizer(self._stage, name, live, self._live)]
            case "stateful":
                return [stage_stateful(self._stage, name, live)]
            case "rng":
                return [stage_rng(self._stage, name, self._live.device_types(), self._rank)]
            case "tree":
                return [stage_tree(self._stage, name, live)]
        return []  # modules are staged together, for their ties


def _byte_counter(progress: Progress | None, total: int) -> "Callable[[int], None] | None":
    done = 0

    def add(size_bytes: int) -> None:
        nonlocal done
        done += size_bytes
        if progress is not None:
            progress(min(done, total), total)

    return None if progress is None else add


def _wait_for_background_save(path: "str | os.PathLike[str]") -> None:
    """Wait for a background save of this process below `path`, so that its checkpoint is included."""
    background = sys.modules.get("workers.checkpoint.saving.background_saver")
    if background is not None:
        background.SHARED.wait_below(path)


def _find_checkpoint(path: Path, step: "int | str") -> Path:
    """Return the checkpoint at a path, or the newest one of a step below it."""
    if os.path.lexists(path / NAME):
        return path
    folders = newest_first(path, follow_links=True)
    chosen = next((folder for folder in folders if step_of(folder) == step), None)
    if chosen is None:
        steps = sorted({step_of(folder) for folder in folders})
        raise NotFound(
            f"no checkpoint of step {step} in {path}", f"saved steps: {', '.join(map(str, steps)) or 'none'}"
        )
    return chosen


def _none_sound(root: Path, skipped: list[SkippedCheckpoint]) -> Exception:
    if not skipped:
        return NotFound(f"no checkpoint in {root}", "save one first, or name another folder")
    return DamagedCheckpoint(
        f"none of the {len(skipped)} checkpoints in {root} is sound; the newest: {skipped[0].reason}",
        "copy one again from its source, or name another folder to start from step 0",
    )
