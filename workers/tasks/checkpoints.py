"""`ctx.checkpoint`: save and restore a training loop's state, with random state, on one rank or many."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import PolyfleetError, UserError
from workers.checkpoint import DamagedCheckpoint, Loaded, Saved, load
from workers.checkpoint.format.manifest import RANDOM
from workers.checkpoint.saving.background_saver import SHARED
from workers.checkpoint.saving.rank_group import is_sharded_state
from workers.checkpoint.saving.saver import PreparedSave, check_no_nan
from workers.checkpoint.state.rng import derived_seed
from workers.devices.backends import random_state
from workers.devices.backends.dtype_checks import supported_dtypes
from workers.devices.backends.precision import every_dtype
from workers.errors import NonFiniteValue
from workers.tasks.resume_choice import candidate_checkpoints, load_newest_undamaged

if TYPE_CHECKING:
    import torch

    from workers.devices.backends.base import BaseBackend
    from workers.tasks.context import Context


@dataclass(frozen=True, slots=True)
class Restored:
    """What `ctx.checkpoint.restore` loaded.

    `step` is the saved step: continue with the next. `extra` is the user's entry; `report` lists conversions.
    """

    step: int
    extra: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)


class CheckpointContext:
    """Save checkpoints in the job's checkpoint folder, and restore the one that the job resumes from."""

    def __init__(self, context: "Context", root: str, resume_from: str, keep: int):
        self._context = context
        self._root = root
        self.resume_from = resume_from
        self._keep = keep
        self._restored = False
        self._load_error: DamagedCheckpoint | None = None
        self.saved = 0
        self.blocked_s = 0.0

    def save(self, step: int, state: dict[str, Any], *, asynchronous: bool = True) -> str:
        """Save `state` (modules, optimizers, nested data, under any names) and random state. Returns the folder.

        Copies the state and writes it while training continues; the next save and the end of the job wait until it is
        written. With `asynchronous=False` it returns once the checkpoint is durable. A state that contains NaN is not
        saved and ends the attempt, unless the job ignores NaN. Every rank calls it: rank 0 writes, or each rank its
        part of a sharded state. Raises UserError without a checkpoint folder, CheckpointError if this or the previous
        save fails.
        """
        self._raise_load_error()
        if not self._root:
            raise UserError("this job has no checkpoint folder", "add `checkpoint: {}` to the job's specification")
        if RANDOM in state:
            raise UserError(f"the name {RANDOM!r} in a checkpoint is reserved", "rename that entry")
        if self._context.non_finite_error is not None:
            raise self._context.non_finite_error
        with self._context.progress.pause():
            return self._save(step, state, asynchronous)

    def _save(self, step: int, state: dict[str, Any], asynchronous: bool) -> str:
        started_s, context = time.perf_counter(), self._context
        states = context.ranks.gather(random_state.rng_state(context.backend))
        everything = {**state, RANDOM: {"seed": context.seed, "ranks": states}}
        write = context.rank == 0 or is_sharded_state(everything)
        result = context.ranks.from_first(self._begin(step, everything) if write else None)
        if isinstance(result, PolyfleetError):
            raise result
        if not asynchronous:
            self.wait()
        self.saved += 1
        self.blocked_s += time.perf_counter() - started_s
        path: str = result
        return path

    def wait(self) -> None:
        """Wait until the last save is durable. Every rank calls it. Raises CheckpointError if the save failed."""
        self._raise_load_error()
        error = None
        with self._context.progress.pause():
            try:
                SHARED.wait()
            except PolyfleetError as e:
                error = e
            first_error = self._context.ranks.from_first(error)
        if error is not None or first_error is not None:
            raise error or first_error

    def finish_saves(self) -> None:
        """Wait until the last save of this rank is durable or has failed."""
        if self._root:
            SHARED.wait_below(self._root)

    def _raise_load_error(self) -> None:
        """Raise the error of a failed load again, also at the end of an attempt whose code caught it."""
        if self._load_error is not None:
            raise self._load_error

    def _begin(self, step: int, everything: dict[str, Any]) -> "str | PolyfleetError":
        """Start a save. With several ranks, return an error, so that the others receive it and do not hang."""
        context = self._context
        try:
            saving = SHARED.save(
                self._root,
                step,
                everything,
                keep=self._keep,
                attempt=context.attempt,
                kind=context.kind,
                on_done=self._report_saved if context.rank == 0 else None,
                around=self._writing,
            )
        except PolyfleetError as e:
            if not context.ranks.is_distributed:
                raise
            return e
        return str(saving.path)

    @contextmanager
    def _writing(self, prepared: PreparedSave) -> Iterator[None]:
        """Run in the writing thread, around the write: a checkpoint that contains NaN is not committed."""
        context = self._context
        with context.progress.saving():
            if context.stop_on_nan:
                try:
                    prepared.ranks.check_all_ranks(lambda: check_no_nan(prepared))
                except NonFiniteValue as e:
                    context.non_finite_error = e
                    raise
            yield

    def _report_saved(self, saved: Saved) -> None:
        """Report a checkpoint to the agent, once it is durable."""
        fields = {"bytes": saved.bytes, "seconds": saved.seconds, "blocked_s": saved.blocked_s}
        self._context.events.write("checkpoint", step=saved.step, path=str(saved.path), **fields)

    def restore(self, into: dict[str, Any]) -> Restored | None:
        """Load the checkpoint that this job resumes from into objects from `ctx.prepare`; None on a fresh start.

        Converts to dtypes that the device has natively, and raises if a conversion would lose values. A CPU also keeps
        dtypes that it emulates. Random state is exact on the same type of device and number of ranks, else derived from
        seed, rank and step; the report says which.

        Every rank calls it. Checksums are verified during the load. It loads the newest undamaged one of the job's own
        checkpoints, the same on all ranks, and lists damaged ones in `report["skipped"]`. If all are damaged it raises
        CheckpointError, and later saves fail too, because the objects may be partly overwritten.
        """
        if not self.resume_from:
            return None
        with self._context.progress.pause():
            return self._restore(into)

    def _restore(self, into: dict[str, Any]) -> Restored:
        backend = self._context.backend
        loaded = self._loaded(into)
        backend.synchronize()
        random_source = self._restore_random(loaded.state.get(RANDOM), loaded.step)
        self._context.last_step = loaded.step
        report = loaded.report.as_dict() | {"random": {"all": random_source}}
        self._context.events.write(
            "note", resumed_step=loaded.step, resumed_from=self.resume_from, random=random_source
        )
        return Restored(loaded.step, loaded.state.get("extra") or {}, report)

    def _loaded(self, into: dict[str, Any]) -> Loaded:
        """Load the checkpoint. Later calls of `restore` read the same one as the first."""
        backend, ranks = self._context.backend, self._context.ranks
        folder = Path(self.resume_from)
        SHARED.wait_below(folder)
        candidates = (
            [folder] if self._restored else candidate_checkpoints(folder, Path(self._root) if self._root else None)
        )
        names = ranks.from_first([str(path.relative_to(folder.parent)) for path in candidates])

        def from_path(path: Path) -> Loaded:
            dtypes = _unconverted_dtypes(backend)
            return load(path, into=into, dtype="native", supported_dtypes=dtypes, verify="once")

        try:
            loaded = load_newest_undamaged([folder.parent / name for name in names], from_path, ranks)
        except DamagedCheckpoint as e:
            self._load_error = e
            raise
        self.resume_from, self._restored = loaded.report.path, True
        return loaded

    def _restore_random(self, saved: dict[str, Any] | None, step: int) -> str:
        context = self._context
        states = (saved or {}).get("ranks", [])
        if len(states) == context.world_size and random_state.accepts_rng_state(context.backend, states[context.rank]):
            random_state.set_rng_state(context.backend, states[context.rank])
            return "exact"
        seed = derived_seed(context.seed, context.rank, step, random_state.rng_type(context.backend))
        random_state.seed(context.backend, seed)
        return f"seeded with {seed}: the saved state is for another device type or number of ranks"


def _unconverted_dtypes(backend: "BaseBackend") -> "frozenset[torch.dtype]":
    """Return the dtypes to restore without conversion.

    A CPU without hardware units for a dtype computes with it slowly, but with the same results as one with units, so a
    training may continue on any CPU of a pool.
    """
    if backend.device.type != "cpu":
        return supported_dtypes(backend)
    return frozenset(dtype for dtype in every_dtype() if backend.dtype_support(dtype) != "absent")
