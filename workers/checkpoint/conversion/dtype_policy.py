"""Choose the dtype that a tensor gets on load, and how much loss is accepted."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase

from workers.checkpoint.conversion.load_report import LoadReport
from workers.checkpoint.conversion.target_dtypes import decide_dtype, unsupported_except, unsupported_on_device
from workers.checkpoint.format.dtypes import DTYPES, dtype_name
from workers.checkpoint.format.manifest import TensorEntry
from workers.checkpoint.format.message_text import first_names
from workers.errors import CheckpointError

Dtypes = str | Mapping[object, object] | Callable[[str, str], object]
ON_LOSSY = ("error", "warn", "allow")


class LossyLoad(UserWarning):
    """Warning that a conversion changed values, which `on_lossy="warn"` allowed."""


class DtypePolicy:
    """Dtypes for loaded tensors: as stored, converted for the device, or as the caller chooses.
    `dtype` is "keep", "native", a mapping or a function. A mapping's keys are dtypes, or names of tensors that may
    contain `*`. `supported` lists the floating and complex dtypes that the device reported (None: not probed); integers
    are supported everywhere. `unsupported` maps each dtype that a kind of device lacks to the reason.
    """

    def __init__(
        self,
        dtype: Dtypes,
        supported: Iterable[object] | None,
        on_lossy: str,
        unsupported: Mapping[str, str] | None = None,
    ):
        if on_lossy not in ON_LOSSY:
            raise CheckpointError(f"on_lossy is {on_lossy!r}", f"use one of {', '.join(ON_LOSSY)}")
        if isinstance(dtype, str) and dtype not in ("keep", "native"):
            raise CheckpointError(
                f"dtype is {dtype!r}", 'use "keep", "native", a function or a mapping such as {"float32": "bfloat16"}'
            )
        self.on_lossy = on_lossy
        self._native = dtype == "native"
        self._requested: Callable[[str, str], object] = dtype if callable(dtype) else lambda _, stored: stored
        mapping = {} if isinstance(dtype, str) or callable(dtype) else dtype
        self._mapping = {dtype_name(k): _check_dtype(v) for k, v in mapping.items()}
        for key in self._mapping:
            if not _is_pattern(key):
                _check_dtype(key)
        self._unsupported = unsupported
        self._supported = None if supported is None else frozenset(dtype_name(d) for d in supported)

    def target_dtype(self, name: str, tensor: TensorEntry, device_type: str) -> str:
        """Return the dtype of `name` on a device. Raises CheckpointError if the device does not support it."""
        unsupported = self._unsupported_on(device_type)
        requested = self._requested_dtype(name, tensor)
        decision = decide_dtype(tensor, requested, unsupported)
        if decision.action == "keep":
            return requested
        if decision.action == "convert" and self._native:
            return decision.to
        raise CheckpointError(
            f"{name} is {requested}: {decision.reason}", _remedy(decision.action, requested, decision.to)
        )

    def _requested_dtype(self, name: str, tensor: TensorEntry) -> str:
        patterns = (to for key, to in self._mapping.items() if _is_pattern(key) and fnmatchcase(name, key))
        if match := next(patterns, ""):
            return match
        if tensor.role == "optimizer" and not tensor.shape:
            return tensor.dtype  # a step count is not a weight: bfloat16 counts only to 256
        return self._mapping.get(tensor.dtype, "") or _check_dtype(self._requested(name, tensor.dtype))

    def check_live_dtype(self, name: str, dtype: str, device_type: str) -> None:
        """Raise CheckpointError if a live tensor's dtype is not supported on its device."""
        if reason := unsupported_on_device(device_type).get(dtype):
            raise CheckpointError(
                f"{name} is {dtype} on {device_type}: {reason}", "convert the model to another dtype first"
            )

    def check_losses(self, report: LoadReport) -> None:
        """Apply `on_lossy` to all conversions of the report. Raises CheckpointError for "error"."""
        lossy = report.lossy()
        if not lossy or self.on_lossy == "allow":
            return
        lines = [
            f"{name} {t.stored_dtype} -> {t.dtype}: {t.change.values_changed} values change"
            f" by at most {t.change.max_abs_error:.3g}, {t.change.new_inf} become inf, {t.change.new_nan} NaN"
            for name, t in lossy.items()
        ]
        message = f"loading step {report.step} would lose values: {first_names(lines, '; ')}"
        if self.on_lossy == "error":
            raise CheckpointError(message, 'accept it with on_lossy="allow" (on the command line --on-lossy allow)')
        warnings.warn(LossyLoad(message), stacklevel=4)

    def _unsupported_on(self, device_type: str) -> Mapping[str, str]:
        if self._unsupported is not None:
            return self._unsupported
        return unsupported_on_device(device_type) if self._supported is None else unsupported_except(self._supported)


def _check_dtype(dtype: object) -> str:
    name = dtype_name(dtype)
    if name not in DTYPES:
        raise CheckpointError(f"dtype names {name!r}", f"choose from {', '.join(DTYPES)}")
    return name


def _is_pattern(key: str) -> bool:
    return "/" in key or "*" in key


def _remedy(action: str, dtype: str, to: str) -> str:
    if action == "convert":
        return f'pass dtype="native" to convert it to {to}'
    return f"leave the tensor out, or load it on the CPU, which keeps {dtype}"
