"""The part of the contract that turns a caller's model into one ready for the device: copied, placed, optimised."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple, cast, overload

import torch
from torch import nn

from cluster.errors import UserError
from workers.backends.parts import placing
from workers.backends.parts.precision import precision_of
from workers.config import compile_mode_of
from workers.optimizers import passes
from workers.optimizers.compiling import inductor
from workers.optimizers.level import OptimizationLevel
from workers.optimizers.work import Prepared, Work, as_sample, own_copy

if TYPE_CHECKING:
    from workers.backends.base import BaseBackend

Dtype = str | torch.dtype | None
Level = str | OptimizationLevel | None


class Trained(NamedTuple):
    """A model and its optimizer ready to train, with what was and was not done."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    applied: list[str]
    skipped: dict[str, str]


class Models:
    """Mixed into BaseBackend. `report` tells what the last call applied, and what it skipped for which reason.

    A `dtype` of None is the precision of the back end's configuration, and a level of None its optimisation level.
    A `sample_input` is a tensor, a tuple of arguments or a dict of keyword arguments; it lets each pass be checked.
    """

    report: Prepared | None = None
    optimization_level: OptimizationLevel

    def prepare_model(
        self, model: nn.Module, level: Level = None, sample_input: Any = None, dtype: Dtype = None
    ) -> nn.Module:
        """A copy of `model` in eval mode on the device, optimised up to `level`; the caller's model is left as it was.

        Raises UserError for what is no Module, an unknown level or a dtype this device has no units for.
        """
        return self.prepare(model, level, sample_input, dtype).model

    def optimize_for_inference(self, model: nn.Module, sample_input: Any = None, dtype: Dtype = None) -> nn.Module:
        """`prepare_model` with everything that is checked and does not search: level O2."""
        return self.prepare(model, OptimizationLevel.O2, sample_input, dtype).model

    @overload
    def optimize_for_training(
        self,
        model: nn.Module,
        optimizer: None = None,
        dtype: Dtype = None,
        level: Level = None,
        sample_input: Any = None,
        inplace: bool = False,
    ) -> nn.Module: ...

    @overload
    def optimize_for_training(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dtype: Dtype = None,
        level: Level = None,
        sample_input: Any = None,
        inplace: bool = False,
    ) -> tuple[nn.Module, torch.optim.Optimizer]: ...

    def optimize_for_training(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        dtype: Dtype = None,
        level: Level = None,
        sample_input: Any = None,
        inplace: bool = False,
    ) -> nn.Module | tuple[nn.Module, torch.optim.Optimizer]:
        """The model, or model and optimizer, on the device: copies bound to each other, or with `inplace` the given.

        In place, ties stay and the optimizer, and schedulers that hold it, go on with the moved parameters.
        """
        done = self.prepare_training(model, optimizer, dtype, level, sample_input, inplace)
        return done.model if done.optimizer is None else (done.model, done.optimizer)

    def prepare(self, model: nn.Module, level: Level = None, sample_input: Any = None, dtype: Dtype = None) -> Prepared:
        """`prepare_model` with its report."""
        chosen, work = self._work(model, level, sample_input, dtype, training=False)
        self.report = passes.run(work.backend.to_device(own_copy(model)), chosen, work)
        return self.report

    def prepare_training(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        dtype: Dtype = None,
        level: Level = None,
        sample_input: Any = None,
        inplace: bool = False,
    ) -> Trained:
        """`optimize_for_training` with its report."""
        chosen, work = self._work(model, level, sample_input, dtype, training=True)
        if not inplace:
            model, optimizer = _copied_together(model, optimizer)
        moved = placing.move_module(model, work.backend.device)
        if optimizer is not None:
            placing.rebind_optimizer(optimizer, moved, work.backend.device)
            self._fit_optimizer(optimizer)
        self.report = passes.run(model, chosen, work)
        return Trained(self.report.model, optimizer, self.report.applied, self.report.skipped)

    def _work(
        self, model: nn.Module, level: Level, sample_input: Any, dtype: Dtype, training: bool
    ) -> tuple[OptimizationLevel, Work]:
        """Everything a caller can get wrong is refused here, before anything is copied or moved."""
        if not isinstance(model, nn.Module):
            raise UserError(
                f"a model must be a torch.nn.Module, not {type(model).__name__}", "return the module itself"
            )
        backend = cast("BaseBackend", self)
        chosen = self.optimization_level if level is None else OptimizationLevel.from_string(level)
        sample = as_sample(sample_input)
        wanted = precision_of(backend.precision if dtype is None else dtype)
        backend.require_dtype(wanted)
        placing.refuse_elsewhere(sample, backend.device)
        found = Work(backend, wanted, training, backend.to_device(sample), compile_mode=compile_mode_of(backend.config))
        return chosen, found

    # Hooks

    def _channels_last_refusal(self, dtype: torch.dtype) -> str:
        """Why channels-last would not help here, "" when it does."""
        return ""

    def _compile(self, model: nn.Module, work: Work) -> nn.Module:
        """The compiler of level O2. Raises Skip; leaves its name in work.details["compile"]."""
        return inductor(model, work)

    def _fit_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Switch off what the moved optimizer was built with and this device cannot do."""


def _copied_together(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """One deep copy of both: the copied optimizer holds the copied parameters."""
    try:
        copied: tuple[nn.Module, torch.optim.Optimizer | None] = copy.deepcopy((model, optimizer))
    except (TypeError, RuntimeError) as e:
        raise UserError(f"the model cannot be copied: {e}", "pass inplace=True to have it moved itself") from e
    return copied
