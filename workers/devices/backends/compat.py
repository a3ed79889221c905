"""Methods of back ends under the names that other libraries use. Each calls a function that does the work.

A vendor's back end does not override them. `BaseBackend` inherits them so that users can write
`backend.prepare_model(model)`; the preparation itself is in functions that take a back end, in
workers/models/optimizers. These calls are the one place where a lower folder imports a higher one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from cluster.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from workers.devices.backends.base import BaseBackend
    from workers.devices.capability.device_info import DeviceInfo
    from workers.models.optimizers.preparation import PreparedTraining
    from workers.models.passes.pass_context import PreparedModel
    from workers.options.config import VendorConfig
    from workers.options.optimization_levels import OptimizationLevel

    Level = str | OptimizationLevel | None
    Dtype = str | torch.dtype | None


class CompatMethods:
    """Mixin of BaseBackend.

    `report` contains what the last call applied, and what it skipped for which reason. A `dtype` or level of None means
    those of the back end's configuration, or, for a model that was prepared before, those it was prepared with.
    `optimization_level` is another name of `level`. `sample_input` is a tensor, a tuple of arguments or a dict of
    keyword arguments; with it, the result of each pass is checked.
    """

    report: PreparedModel | None = None
    fallback_from: str = ""
    """The back end that was requested, if this one is used instead; `fallback_reason` says why."""
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
        """Return a copy of `model` on the device, optimised up to `level`. The caller's model is not changed.

        If the model is in training mode, so is the copy, and passes for inference only are skipped with that reason.
        Raises UserError if `model` is not a Module, the level is unknown, or the device has no units for the dtype.
        """
        return self.prepare(model, level, sample_input, dtype, optimization_level=optimization_level).model

    def optimize_for_inference(self, model: nn.Module, sample_input: Any = None, dtype: Dtype = None) -> nn.Module:
        """Prepare a copy of the model in eval mode at level O2: all passes that are checked and do not search."""
        from workers.models.optimizers import preparation

        return preparation.prepare(_own(self), model, "O2", sample_input, dtype, inference=True).model

    def prepare_model_with_custom_kernels(
        self, model: nn.Module, sample_input: Any = None, dtype: Dtype = None
    ) -> nn.Module:
        """Return a copy of `model` on the device, with custom kernels where they are measured to be faster.

        The kernels are compared with the model's own modules in a call with `sample_input`. `report` lists those used,
        and why others were not. See workers/models/optimizers/custom_kernels.py.
        """
        from workers.models.optimizers import custom_kernels

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
        """Like `prepare_model`, but return the model with its report."""
        from workers.models.optimizers import preparation

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
        """Return the model on the device, a copy unless `inplace`, and the optimizer, now bound to it.

        The optimizer may have been built from the model, or from the one it was prepared from. It remains the same
        object, so that schedulers which refer to it keep working. Raises UserError for an optimizer of another model.
        """
        chosen_level = _one_of(level, optimization_level)
        result = self.prepare_training(model, optimizer, dtype, chosen_level, sample_input, inplace)
        return result.model if result.optimizer is None else (result.model, result.optimizer)

    def prepare_training(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        dtype: Dtype = None,
        level: Level = None,
        sample_input: Any = None,
        inplace: bool = False,
    ) -> PreparedTraining:
        """Like `optimize_for_training`, but return the results with a report."""
        from workers.models.optimizers import preparation

        return preparation.prepare_training(_own(self), model, optimizer, dtype, level, sample_input, inplace)

    # The device

    @property
    def is_available(self) -> bool:
        return not _own(self).unavailable_reason()

    @property
    def device_count(self) -> int:
        return _own(self).count_devices()

    @property
    def kind(self) -> str:
        """Kind of the device, as in discovery: `nvidia:H100-80GB`, `tpu:v5e`, `cpu`."""
        return str(_own(self)._info().get("kind", _own(self).BACKEND_NAME))

    @property
    def device_name(self) -> str:
        return _own(self).get_device_info().device_name

    @property
    def precision(self) -> str:
        """Default precision: that of the configuration, else float32."""
        return self.config.precision

    def get_all_devices(self) -> list[DeviceInfo]:
        return [_own(self).get_device_info(number) for number in range(self.device_count)]

    def max_memory_bytes(self) -> int | None:
        """Maximum device memory for this process: all of it, or the configured `memory_fraction`."""
        total, fraction = _own(self).get_memory_stats()["total_bytes"], getattr(self.config, "memory_fraction", None)
        return total if total is None or fraction is None else int(total * fraction)

    def max_shared_memory_bytes(self) -> int | None:
        """On-chip memory that a block of threads can share; None if the device has none, or it is unknown."""
        size_bytes = _own(self)._info().get("shared_memory_per_block_bytes")
        return None if size_bytes is None else int(size_bytes)

    @property
    def rng_type(self) -> str:
        """Type of random states, which can be moved between all devices of the same type."""
        return _own(self)._rng_type()

    def accepts_rng_state(self, state: dict[str, Any]) -> bool:
        return bool(state["device_type"] == self.rng_type)

    def supports_dtype(self, dtype: str | torch.dtype) -> bool:
        """Return whether the device computes with a dtype natively: see `dtype_support`."""
        return _own(self).dtype_support(dtype) == "native"

    def supported_dtypes(self) -> frozenset[torch.dtype]:
        """Return the dtypes that the device computes with natively."""
        from workers.devices.backends.precision import every_dtype

        return frozenset(dtype for dtype in every_dtype() if self.supports_dtype(dtype))

    def require_dtype(self, dtype: str | torch.dtype) -> None:
        """Raise UserError for a dtype that the device does not compute with natively; float32 always passes."""
        from workers.devices.backends.precision import dtype_of, name_of

        name = name_of(dtype_of(dtype))
        support = "native" if name == "float32" else _own(self).dtype_support(name)
        if support != "native":
            native = [n for n in ("bfloat16", "float16", "float32") if n == "float32" or self.supports_dtype(n)]
            reason = "it is emulated by conversion, many times slower than float32" if support == "emulated" else ""
            message = f"{_own(self).device} has no native {name}" + (f": {reason}" if reason else "")
            raise UserError(message, f"use {' or '.join(native)}")


def _own(backend: CompatMethods) -> BaseBackend:
    """The back end these names are mixed into."""
    return backend  # type: ignore[return-value]


def _one_of(level: Level, other_name: Level) -> Level:
    if level is not None and other_name is not None:
        raise UserError(
            "both level and optimization_level were passed", "they are two names of one option: pass only one"
        )
    return other_name if level is None else level
