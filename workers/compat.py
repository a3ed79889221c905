"""Names that users of other libraries know, beside the contract: each is one call of what has it all.

A back end never fills these. `BaseBackend` inherits them so that `backend.prepare_model(model)` reads as people write
it; preparing itself is functions over a back end, in workers/optimizers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from cluster.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from workers.backends.base import BaseBackend
    from workers.config import VendorConfig
    from workers.device_info import DeviceInfo
    from workers.optimization_levels import OptimizationLevel
    from workers.optimizers.pass_context import PreparedModel
    from workers.optimizers.preparation import Trained

    Level = str | OptimizationLevel | None
    Dtype = str | torch.dtype | None


class CompatMethods:
    """Mixed into BaseBackend. `report` tells what the last call applied, and what it skipped for which reason.

    A `dtype` of None is the precision of the back end's configuration, and a level of None its optimisation level; of a
    model that was prepared before, those it was prepared with. `optimization_level` is another name of `level`. A
    `sample_input` is a tensor, a tuple of arguments or a dict of keyword arguments; it lets each pass be checked.
    """

    report: PreparedModel | None = None
    fallback_from: str = ""
    """The back end that was asked for, where this one took its place; `fallback_reason` says why."""
    fallback_reason: str = ""
    config: VendorConfig

    def prepare_model(
        self,
        model: nn.Module,
        level: Level = None,
        sample_input: Any = None,
        dtype: Dtype = None,
        *,
        optimization_level: Level = None,
    ) -> nn.Module:
        """A copy of `model` on the device, optimised up to `level`; the caller's model is left as it was.

        The copy is in training mode where the model was; what only inference allows is then skipped with that reason.
        Raises UserError for what is no Module, an unknown level or a dtype this device has no units for.
        """
        return self.prepare(model, level, sample_input, dtype, optimization_level=optimization_level).model

    def optimize_for_inference(self, model: nn.Module, sample_input: Any = None, dtype: Dtype = None) -> nn.Module:
        """`prepare_model` in eval mode, with everything that is checked and does not search: level O2."""
        from workers.optimizers import preparation

        return preparation.prepare(_own(self), model, "O2", sample_input, dtype, inference=True).model

    def prepare_model_with_custom_kernels(
        self, model: nn.Module, sample_input: Any = None, dtype: Dtype = None
    ) -> nn.Module:
        """A copy of `model` on the device, with kernels where they are measured to be faster than its own modules in a
        call with `sample_input`. See workers/optimizers/custom_kernels.py; `report` tells which, and why not others.
        """
        from workers.optimizers import custom_kernels

        return custom_kernels.prepare_model_with_custom_kernels(_own(self), model, sample_input, dtype).model

    def prepare(
        self,
        model: nn.Module,
        level: Level = None,
        sample_input: Any = None,
        dtype: Dtype = None,
        *,
        optimization_level: Level = None,
    ) -> PreparedModel:
        """`prepare_model` with its report."""
        from workers.optimizers import preparation

        return preparation.prepare(_own(self), model, _one_of(level, optimization_level), sample_input, dtype)

    @overload
    def optimize_for_training(
        self,
        model: nn.Module,
        optimizer: None = None,
        dtype: Dtype = None,
        level: Level = None,
        sample_input: Any = None,
        inplace: bool = False,
        *,
        optimization_level: Level = None,
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
        *,
        optimization_level: Level = None,
    ) -> tuple[nn.Module, torch.optim.Optimizer]: ...

    def optimize_for_training(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        dtype: Dtype = None,
        level: Level = None,
        sample_input: Any = None,
        inplace: bool = False,
        *,
        optimization_level: Level = None,
    ) -> nn.Module | tuple[nn.Module, torch.optim.Optimizer]:
        """The model on the device, a copy unless `inplace`, and the optimizer that was given, now bound to it.

        The optimizer may have been built from the model, or from the one it was prepared from. It is the same object,
        so that schedulers which hold it go on. Raises UserError for an optimizer of another model.
        """
        chosen = _one_of(level, optimization_level)
        done = self.prepare_training(model, optimizer, dtype, chosen, sample_input, inplace)
        return done.model if done.optimizer is None else (done.model, done.optimizer)

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
        from workers.optimizers import preparation

        return preparation.prepare_training(_own(self), model, optimizer, dtype, level, sample_input, inplace)

    # Of the device

    @property
    def is_available(self) -> bool:
        return not _own(self).unavailable_reason()

    @property
    def device_count(self) -> int:
        return _own(self).count_devices()

    @property
    def kind(self) -> str:
        """As discovery spells it: `nvidia:H100-80GB`, `tpu:v5e`, `cpu`."""
        return str(_own(self)._info().get("kind", _own(self).BACKEND_NAME))

    @property
    def device_name(self) -> str:
        return _own(self).get_device_info().device_name

    @property
    def precision(self) -> str:
        """What to compute in where a caller says nothing: the configuration's, else float32."""
        return self.config.precision

    def get_all_devices(self) -> list[DeviceInfo]:
        return [_own(self).get_device_info(number) for number in range(self.device_count)]

    def max_memory_bytes(self) -> int | None:
        """The most this process may hold on the device: all of it, or the configured `memory_fraction`."""
        total, fraction = _own(self).get_memory_stats()["total_bytes"], getattr(self.config, "memory_fraction", None)
        return total if total is None or fraction is None else int(total * fraction)

    def max_shared_memory_bytes(self) -> int | None:
        """On-chip memory one block of threads may share; None where the device has none, or nobody tells."""
        told = _own(self)._info().get("shared_memory_per_block_bytes")
        return None if told is None else int(told)

    @property
    def rng_type(self) -> str:
        """Random states move freely between devices that answer the same."""
        return _own(self)._rng_type()

    def accepts_rng_state(self, state: dict[str, Any]) -> bool:
        return bool(state["device_type"] == self.rng_type)

    def supports_dtype(self, dtype: str | torch.dtype) -> bool:
        """Whether the device computes with a dtype natively: see `dtype_support`."""
        return _own(self).dtype_support(dtype) == "native"

    def supported_dtypes(self) -> frozenset[torch.dtype]:
        """Dtypes the device computes with natively."""
        from workers.backends.parts.precision import every_dtype

        return frozenset(dtype for dtype in every_dtype() if self.supports_dtype(dtype))

    def require_dtype(self, dtype: str | torch.dtype) -> None:
        """Raises UserError for a dtype the device does not compute with natively; float32 always passes."""
        from workers.backends.parts.precision import dtype_of, name_of

        name = name_of(dtype_of(dtype))
        support = "native" if name == "float32" else _own(self).dtype_support(name)
        if support != "native":
            native = [n for n in ("bfloat16", "float16", "float32") if n == "float32" or self.supports_dtype(n)]
            why = "it is computed by conversion there, many times slower than float32" if support == "emulated" else ""
            told = f"{_own(self).device} has no native {name}" + (f": {why}" if why else "")
            raise UserError(told, f"ask for {' or '.join(native)}")


def _own(backend: CompatMethods) -> BaseBackend:
    """The back end these names are mixed into."""
    return backend  # type: ignore[return-value]


def _one_of(level: Level, other_name: Level) -> Level:
    if level is not None and other_name is not None:
        raise UserError("both level and optimization_level are given", "they are two names of one thing: give one")
    return other_name if level is None else level
