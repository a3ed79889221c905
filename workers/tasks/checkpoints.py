"""`ctx.checkpoint`: what a user's loop saves and restores, with random state, on one rank or many."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import PolyfleetError, UserError
from workers.backends.parts.precision import every_dtype
from workers.backends.parts.random_state import derived_seed
from workers.checkpoint import DamagedCheckpoint, Loaded, Saved, load
from workers.checkpoint.background_saver import SHARED
from workers.checkpoint.format.manifest import RANDOM
from workers.checkpoint.nan_check import check_no_nan
from workers.checkpoint.saver import PreparedSave
from workers.checkpoint.state.rank_group import cut_among_ranks
from workers.errors import NonFiniteValue
from workers.tasks.resume_choice import candidate_checkpoints, newest_sound

if TYPE_CHECKING:
    import torch

    from workers.backends.base import BaseBackend
    from workers.tasks.context import Context


@dataclass(frozen=True, slots=True)
class Restored:
    """`step` is the saved one: go on with the next. `extra` is the user's; `report` tells what was converted."""

    step: int
    extra: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)


class CheckpointContext:
    """Saves below the job's checkpoint folder, restores what the job is to resume from."""

    def __init__(self, context: "Context", root: str, resume_from: str, keep: int):
        self._context = context
        self._root = root
        self.resume_from = resume_from
        self._keep = keep
        self._restored = False
        self._spoiled: DamagedCheckpoint | None = None
        self.saved = 0
        self.blocked_s = 0.0

    def save(self, step: int, state: dict[str, Any], *, asynchronous: bool = True) -> str:
        """Save `state` (modules, optimizers, nested data under names of your choice) and the random state; returns the
        folder it goes to. A state that holds NaN is not kept, and ends the attempt, unless the job ignores it.

        A copy is taken, and written while training goes on; the next save waits for it, and so does the end of the job.
        Every rank calls it. Rank 0 writes, or each its part of what is cut among the ranks. Raises UserError without a
        folder, CheckpointError on trouble, also with the save before. `asynchronous=False` returns once it is durable.
        """
        self._refuse_spoiled()
        if not self._root:
            raise UserError("this job has no checkpoint folder", "give it checkpoint: {} in its specification")
        if RANDOM in state:
            raise UserError(f"the name {RANDOM!r} in a checkpoint is ours", "call that entry something else")
        if self._context.poisoned is not None:
            raise self._context.poisoned
        with self._context.beats.pause():
            return self._save(step, state, asynchronous)

    def _save(self, step: int, state: dict[str, Any], asynchronous: bool) -> str:
        started_s, context = time.perf_counter(), self._context
        states = context.ranks.gathered(context.backend.rng_state())
        everything = {**state, RANDOM: {"seed": context.seed, "ranks": states}}
        write = context.rank == 0 or cut_among_ranks(everything)
        told = context.ranks.from_first(self._begin(step, everything) if write else None)
        if isinstance(told, PolyfleetError):
            raise told
        if not asynchronous:
            self.wait()
        self.saved += 1
        self.blocked_s += time.perf_counter() - started_s
        path: str = told
        return path

    def wait(self) -> None:
        """Until what was saved last is durable. Every rank calls it. Raises CheckpointError where it could not be."""
        self._refuse_spoiled()
        error = None
        with self._context.beats.pause():
            try:
                SHARED.wait()
            except PolyfleetError as e:
                error = e
            told = self._context.ranks.from_first(error)
        if error is not None or told is not None:
            raise error or told

    def settle(self) -> None:
        """Until what was saved last is durable, or was not to be. Of this rank alone."""
        if self._root:
            SHARED.settle(self._root)

    def _refuse_spoiled(self) -> None:
        """Also at the end of an attempt whose code went on after a load that failed amid it."""
        if self._spoiled is not None:
            raise self._spoiled

    def _begin(self, step: int, everything: dict[str, Any]) -> "str | PolyfleetError":
        """An error of ours is returned: the other ranks wait, and must hear of it rather than hang."""
        context = self._context
        try:
            saving = SHARED.save(
                self._root,
                step,
                everything,
                keep=self._keep,
                attempt=context.attempt,
                kind=context.kind,
                on_done=self._tell if context.rank == 0 else None,
                around=self._writing,
            )
        except PolyfleetError as e:
            if not context.ranks.many:
                raise
            return e
        return str(saving.path)

    @contextmanager
    def _writing(self, prepared: PreparedSave) -> Iterator[None]:
        """In the thread that writes: a checkpoint that holds NaN is never committed."""
        context = self._context
        with context.beats.saving():
            if context.stop_on_nan:
                try:
                    prepared.ranks.all_or_none(lambda: check_no_nan(prepared))
                except NonFiniteValue as e:
                    context.poisoned = e
                    raise
            yield

    def _tell(self, saved: Saved) -> None:
        """Once it is durable: what the fleet hears of exists."""
        fields = {"bytes": saved.bytes, "seconds": saved.seconds, "blocked_s": saved.blocked_s}
        self._context.events.write("checkpoint", step=saved.step, path=str(saved.path), **fields)

    def restore(self, into: dict[str, Any]) -> Restored | None:
        """Load what this job resumes from into modules and optimizers that `ctx.prepare` has placed; None on a fresh
        start.

        Dtypes become what the device has natively; a loss is refused. A CPU keeps those it emulates, too. Random state
        is exact on the same type of device with the same number of ranks, else derived from seed, rank and step, as the
        report says.

        Every rank calls it. Bytes are proved while they are loaded. Of the job's own checkpoints the newest sound one
        is taken, the same on all ranks, and `report["skipped"]` has those that are damaged. Where none is sound it
        raises CheckpointError; nothing can be saved then, since what was to be filled may hold anything.
        """
        if not self.resume_from:
            return None
        with self._context.beats.pause():
            return self._restore(into)

    def _restore(self, into: dict[str, Any]) -> Restored:
        backend = self._context.backend
        loaded = self._loaded(into)
        backend.synchronize()
        how = self._restore_random(loaded.state.get(RANDOM), loaded.step)
        self._context.last_step = loaded.step
        report = loaded.report.as_dict() | {"random": {"all": how}}
        self._context.events.write("note", resumed_step=loaded.step, resumed_from=self.resume_from, random=how)
        return Restored(loaded.step, loaded.state.get("extra") or {}, report)

    def _loaded(self, into: dict[str, Any]) -> Loaded:
        """What is restored in several calls comes from one checkpoint."""
        backend, ranks = self._context.backend, self._context.ranks
        folder = Path(self.resume_from)
        SHARED.settle(folder)
        found = [folder] if self._restored else candidate_checkpoints(folder, Path(self._root) if self._root else None)
        names = ranks.from_first([str(path.relative_to(folder.parent)) for path in found])

        def from_path(path: Path) -> Loaded:
            held = _held(backend)
            return load(path, into=into, dtype="native", supported_dtypes=held, verify="once")

        try:
            loaded = newest_sound([folder.parent / name for name in names], from_path, ranks)
        except DamagedCheckpoint as e:
            self._spoiled = e
            raise
        self.resume_from, self._restored = loaded.report.path, True
        return loaded

    def _restore_random(self, saved: dict[str, Any] | None, step: int) -> str:
        context = self._context
        states = (saved or {}).get("ranks", [])
        if len(states) == context.world_size and context.backend.accepts_rng_state(states[context.rank]):
            context.backend.set_rng_state(states[context.rank])
            return "exact"
        seed = derived_seed(context.seed, context.rank, step, context.backend.rng_type)
        context.backend.seed(seed)
        return f"seeded anew with {seed}: the saved state is of another device type or number of ranks"


def _held(backend: "BaseBackend") -> "frozenset[torch.dtype]":
    """What is restored as it was saved. A CPU without units for a dtype computes with it slowly, and exactly as one
    with them: training goes on as it was, whichever CPU of a pool it comes to.
    """
    if backend.device.type != "cpu":
        return backend.supported_dtypes()
    return frozenset(dtype for dtype in every_dtype() if backend.dtype_support(dtype) != "absent")
