"""The contract of a back end: a public method does the common work, a vendor fills short hooks where it differs."""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from cluster.accelerators import TABLE
from cluster.errors import UserError
from workers.backends.parts import placing, random_state
from workers.backends.parts.precision import dtype_of, every_dtype, name_of, precision_of
from workers.optimizers import passes
from workers.optimizers.passes import Prepared

Memory = dict[str, int | None]


class Trained(NamedTuple):
    """A model and its optimizer ready to train, with what was and was not done."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    applied: list[str]
    skipped: dict[str, str]


class BaseBackend(ABC):
    """One device of one vendor in this process. As a context manager it gives back what it changed and frees caches."""

    BACKEND_NAME: ClassVar[str] = ""
    emulated: bool = False
    """The device computes on the CPU; its numbers say nothing of the real one."""

    def __init__(self, index: int = 0):
        count = self.device_count()
        if not 0 <= index < count:
            raise UserError(f"{self.BACKEND_NAME} has no device {index}", f"this process sees {count}, numbered from 0")
        self.index = index
        self.device = self._device(index)
        self._stack: ExitStack | None = None
        self._dtypes: dict[torch.dtype, bool] = {}

    # Is it here?

    @classmethod
    @abstractmethod
    def unavailable_reason(cls) -> str:
        """Why no device of this backend can be used in this process, "" when one can."""

    @classmethod
    def is_available(cls) -> bool:
        return not cls.unavailable_reason()

    @classmethod
    @abstractmethod
    def device_count(cls) -> int:
        """Devices this process sees."""

    def device_info(self) -> dict[str, Any]:
        """What this environment knows of the device, as plain data. `total_memory_bytes` is None where nobody tells."""
        return {
            "backend": self.BACKEND_NAME,
            "device": str(self.device),
            "index": self.index,
            "emulated": self.emulated,
            "name": platform.machine(),
            "total_memory_bytes": self.memory_stats()["total_bytes"],
            "collective_backend": self.collective_backend,
            "versions": {"torch": str(torch.__version__)},
        } | self._info()

    # Data and time

    def to_device(self, value: Any, non_blocking: bool = False) -> Any:
        """Nested data with its tensors here. A module moves in place with its ties; an object with a `to` uses that."""
        return placing.place(value, self.device, non_blocking)

    def synchronize(self) -> None:
        """Return when everything asked of the device so far has been computed."""

    def step_boundary(self) -> None:
        """End of one step. Where tensors are lazy the step's graph is cut and sent off here; nothing waits."""

    def empty_cache(self) -> None:
        """Give memory that is cached but unused back to the device."""

    @abstractmethod
    def memory_stats(self) -> Memory:
        """allocated_, reserved_, peak_, free_ and total_bytes; None for what this device does not tell."""

    # Random numbers

    def seed(self, number: int) -> None:
        """Seed Python, NumPy, torch and the device."""
        random_state.seed_host(number)
        self._seed_device(number)

    @property
    def rng_type(self) -> str:
        """Random states move freely between devices that answer the same."""
        return self.device.type

    def rng_state(self) -> dict[str, Any]:
        """State of every generator, as tensors and numbers. It can be set again on the same type of device only."""
        return {"device_type": self.rng_type, "device": self._device_rng(), "host": random_state.capture_host()}

    def accepts_rng_state(self, state: dict[str, Any]) -> bool:
        return bool(state["device_type"] == self.rng_type)

    def set_rng_state(self, state: dict[str, Any]) -> None:
        """Raises UserError for a state of another type of device: those bits mean nothing here."""
        if not self.accepts_rng_state(state):
            raise UserError(
                f"random state of {state['device_type']} cannot be set on {self.rng_type}",
                "seed instead; workers.backends.parts.random_state.derived_seed gives a number to seed with",
            )
        random_state.restore_host(state["host"])
        self._set_device_rng(state["device"])

    # Precision

    def supports_dtype(self, dtype: str | torch.dtype) -> bool:
        """Whether the device holds this dtype's bits and computes with it natively. Tried out once, on one element."""
        wanted = dtype_of(dtype)
        if wanted not in self._dtypes:
            self._dtypes[wanted] = self._is_native(wanted) and self._round_trips(wanted)
        return self._dtypes[wanted]

    def supported_dtypes(self) -> frozenset[torch.dtype]:
        return frozenset(d for d in every_dtype() if self.supports_dtype(d))

    def autocast(self, dtype: str | torch.dtype | None) -> AbstractContextManager[Any]:
        """Lower precision where torch deems it safe; nothing for float32, None and "". Raises UserError if absent."""
        wanted = precision_of(dtype)
        if wanted == torch.float32:
            return nullcontext()
        if not self.supports_dtype(wanted):
            raise UserError(
                f"{self.device} has no native {name_of(wanted)}", "ask for float32 or bfloat16 in this candidate"
            )
        return torch.autocast(self.device.type, dtype=wanted)

    # Models

    def prepare_model(
        self, model: nn.Module, level: str = "O1", sample_input: Any = None, dtype: str | torch.dtype | None = None
    ) -> Prepared:
        """A copy of `model` in eval mode on the device, optimised up to `level`; the caller's model is left as it was.

        `sample_input` (a tensor, a tuple of arguments or a dict of keyword arguments) lets each pass be checked.
        """
        if not isinstance(model, nn.Module):
            raise UserError(
                f"a model must be a torch.nn.Module, not {type(model).__name__}", "return the module itself"
            )
        chosen = passes.level_of(level)
        work = passes.Work(self, precision_of(dtype), False, self.to_device(passes.as_sample(sample_input)))
        return passes.run(self.to_device(passes.own_copy(model)), chosen, work)

    def optimize_for_inference(
        self, model: nn.Module, sample_input: Any = None, dtype: str | torch.dtype | None = None
    ) -> Prepared:
        """`prepare_model` with everything this backend has."""
        return self.prepare_model(model, passes.LEVELS[-1], sample_input, dtype)

    def optimize_for_training(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        dtype: str | torch.dtype | None = None,
        level: str = "O1",
        sample_input: Any = None,
    ) -> Trained:
        """Move `model`, and `optimizer` with it, in place; ties stay, the optimizer holds the moved parameters."""
        chosen = passes.level_of(level)
        moved = placing.move_module(model, self.device)
        if optimizer is not None:
            placing.rebind_optimizer(optimizer, moved, self.device)
            self._fit_optimizer(optimizer)
        work = passes.Work(self, precision_of(dtype), True, self.to_device(passes.as_sample(sample_input)))
        prepared = passes.run(model, chosen, work)
        return Trained(prepared.model, optimizer, prepared.applied, prepared.skipped)

    # Several ranks

    @property
    @abstractmethod
    def collective_backend(self) -> str:
        """The torch.distributed backend for tensors on this device."""

    def init_group(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        """Make the default group of torch.distributed."""
        dist.init_process_group(self.collective_backend, store=store, rank=rank, world_size=world_size, timeout=timeout)

    def data_parallel(self, model: nn.Module) -> nn.Module:
        """`model`, already here, with gradients averaged over the ranks during backward."""
        return nn.parallel.DistributedDataParallel(model)

    # Giving back

    def __enter__(self) -> BaseBackend:
        self._stack = ExitStack()
        self._enter(self._stack.callback)
        return self

    def __exit__(self, *error: object) -> None:
        if self._stack is not None:
            self._stack.close()
            self._stack = None
        self.empty_cache()

    # Hooks

    def _device(self, index: int) -> torch.device:
        return torch.device(TABLE[self.BACKEND_NAME].torch_device, index)

    def _info(self) -> dict[str, Any]:
        """More for `device_info`, and better answers than the common ones."""
        return {}

    def _enter(self, later: Callable[..., Any]) -> None:
        """Change what this backend needs changed in the process; give `later` a function that changes it back."""

    def _seed_device(self, number: int) -> None:
        """torch.manual_seed has seeded what torch knows; here is for what it does not."""

    def _device_rng(self) -> Any:
        return None

    def _set_device_rng(self, state: Any) -> None:
        """Set what `_device_rng` returned."""

    def _is_native(self, dtype: torch.dtype) -> bool:
        """False for what the device stores but cannot compute with at a sensible speed."""
        return True

    def _round_trips(self, dtype: torch.dtype) -> bool:
        value = torch.tensor([1 + 2j] if dtype.is_complex else [1.0]).to(dtype)
        try:
            back = value.to(self.device).cpu()
        except (RuntimeError, TypeError):
            return False
        return torch.equal(back.view(torch.uint8), value.view(torch.uint8)) if dtype != torch.bool else bool(back.all())

    def _channels_last_refusal(self, dtype: torch.dtype) -> str:
        """Why channels-last would not help here, "" when it does."""
        return ""

    def _compile(self, model: nn.Module, work: passes.Work) -> nn.Module:
        """The compiler of level O2. Raises passes.Skip; leaves its name in work.details["compile"]."""
        return passes.inductor(model, work)

    def _fit_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Switch off what the moved optimizer was built with and this device cannot do."""
