"""Which dtype a tensor gets on load, where it may go, and how much loss is accepted."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase

from workers.checkpoint.format.dtypes import DTYPES, dtype_name
from workers.checkpoint.format.manifest import TensorEntry
from workers.checkpoint.format.message_text import first_names
from workers.checkpoint.load_report import LoadReport
from workers.checkpoint.target_dtypes import decide_dtype, unsupported_except, unsupported_on_device
from workers.errors import CheckpointError

Dtypes = str | Mapping[object, object] | Callable[[str, str], object]
ON_LOSSY = ("error", "warn", "allow")


class LossyLoad(UserWarning):
    """Values changed by a conversion that `on_lossy="warn"` let pass."""


class DtypePolicy:
    """`dtype` is "keep", "native", a mapping or a function; `supported` the device's own floating and complex dtypes,
    where it was asked; integers are held everywhere. `lacks` has what a kind of device does not hold, and why. A
    mapping's keys are dtypes, or names of tensors with `*` in them.
    """

    def __init__(
        self,
        dtype: Dtypes,
        supported: Iterable[object] | None,
        on_lossy: str,
        lacks: Mapping[str, str] | None = None,
    ):
        if on_lossy not in ON_LOSSY:
            raise CheckpointError(f"on_lossy is {on_lossy!r}", f"use one of {', '.join(ON_LOSSY)}")
        if isinstance(dtype, str) and dtype not in ("keep", "native"):
            raise CheckpointError(
                f"dtype is {dtype!r}", 'use "keep", "native", a function or a mapping such as {"float32": "bfloat16"}'
            )
        self.on_lossy = on_lossy
        self._native = dtype == "native"
        self._asked: Callable[[str, str], object] = dtype if callable(dtype) else lambda _, stored: stored
        mapping = {} if isinstance(dtype, str) or callable(dtype) else dtype
        self._mapping = {dtype_name(k): _known(v) for k, v in mapping.items()}
        for key in self._mapping:
            if not _is_pattern(key):
                _known(key)
        self._lacking = lacks
        self._supported = None if supported is None else frozenset(dtype_name(d) for d in supported)

    def wanted(self, name: str, tensor: TensorEntry, device_type: str) -> str:
        """The dtype `name` gets on a device. Raises CheckpointError where the device cannot hold it."""
        lacks = self._lacks(device_type)
        wanted = self._chosen(name, tensor)
        decided = decide_dtype(tensor, wanted, lacks)
        if decided.action == "keep":
            return wanted
        if decided.action == "convert" and self._native:
            return decided.to
        raise CheckpointError(f"{name} is {wanted}: {decided.reason}", _remedy(decided.action, wanted, decided.to))

    def _chosen(self, name: str, tensor: TensorEntry) -> str:
        patterns = (to for key, to in self._mapping.items() if _is_pattern(key) and fnmatchcase(name, key))
        if named := next(patterns, ""):
            return named
        if tensor.role == "optimizer" and not tensor.shape:
            return tensor.dtype  # a count of steps is no weight: bfloat16 counts to 256
        return self._mapping.get(tensor.dtype, "") or _known(self._asked(name, tensor.dtype))

    def admit(self, name: str, live: str, device_type: str) -> None:
        """Raises CheckpointError where a live tensor's own dtype cannot be filled on its device."""
        if why := unsupported_on_device(device_type).get(live):
            raise CheckpointError(
                f"{name} is {live} on {device_type}: {why}", "convert the model to another dtype first"
            )

    def judge(self, report: LoadReport) -> None:
        """Apply `on_lossy` to all that was converted. Raises CheckpointError for "error"."""
        lossy = report.lossy()
        if not lossy or self.on_lossy == "allow":
            return
        lines = [
            f"{name} {t.stored_dtype} -> {t.dtype}: {t.change.values_changed} values change"
            f" by at most {t.change.max_abs_error:.3g}, {t.change.new_inf} become inf, {t.change.new_nan} NaN"
            for name, t in lossy.items()
        ]
        sentence = f"loading step {report.step} would lose values: {first_names(lines, '; ')}"
        if self.on_lossy == "error":
            raise CheckpointError(sentence, 'accept it with on_lossy="allow" (on the command line --on-lossy allow)')
        warnings.warn(LossyLoad(sentence), stacklevel=4)

    def _lacks(self, device_type: str) -> Mapping[str, str]:
        if self._lacking is not None:
            return self._lacking
        return unsupported_on_device(device_type) if self._supported is None else unsupported_except(self._supported)


def _known(dtype: object) -> str:
    name = dtype_name(dtype)
    if name not in DTYPES:
        raise CheckpointError(f"dtype names {name!r}", f"known: {', '.join(DTYPES)}")
    return name


def _is_pattern(key: str) -> bool:
    return "/" in key or "*" in key


def _remedy(action: str, dtype: str, to: str) -> str:
    if action == "convert":
        return f'pass dtype="native" to convert it to {to}'
    return f"leave it out, or keep it on the CPU: {dtype} stays as it is there"
