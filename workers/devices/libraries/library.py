"""Description of one execution library: availability, switch and effect check. Importing this imports no torch."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import UserError


@dataclass(frozen=True, slots=True)
class Switch:
    """Functions that read and set a library's state in the running process; calling one imports torch.

    They change only `enabled`: torch.backends.mkldnn.flags() would also reset precision and determinism, and
    set_flags(deterministic=True) switches oneDNN off (its default for `enabled`).
    """

    read: Callable[[], bool]
    set: Callable[[bool], Any]


@dataclass(frozen=True, slots=True)
class EffectCheck:
    """Outcome of a library's workload: `effective` if it ran in the state that was `expected`, with the evidence."""

    library: str
    expected: bool
    effective: bool
    evidence: str


@dataclass(frozen=True, slots=True)
class Library:
    """One execution library.

    Without a `switch`, `fresh` has the environment variables of a new process by state, and `launcher` is the argv to
    put before its command. `observe` runs a workload in the current state; it returns whether the library computed it,
    and the evidence.
    """

    name: str
    display_name: str
    requires_gpu: bool
    devices: tuple[str, ...]
    required_libraries: tuple[str, ...]
    unavailable_reason: Callable[[], str]
    version: Callable[[], str]
    settings: tuple[str, ...] = ()
    switch: Switch | None = None
    fresh: Mapping[bool, Mapping[str, str]] = field(default_factory=dict)
    launcher: tuple[str, ...] = ()
    observe: Callable[[], tuple[bool, str]] | None = None

    @property
    def available(self) -> bool:
        return not self.unavailable_reason()

    def require(self) -> None:
        """Raise UserError with the reason if the library is unavailable."""
        if reason := self.unavailable_reason():
            raise UserError(
                f"{self.display_name} cannot be used here: {reason}",
                "run `polyfleet backends --libraries` to see which libraries are available",
            )

    def enable(self) -> AbstractContextManager[None]:
        """Switch the library on inside a `with`. Raises UserError if it is unavailable or has no switch."""
        self.require()
        return self._switched(True)

    def disable(self) -> AbstractContextManager[None]:
        """Switch the library off inside a `with`. Raises UserError if it has no switch."""
        return self._switched(False)

    @contextmanager
    def _switched(self, on: bool) -> Iterator[None]:
        """Set the switch, and restore it at the end. It applies to all threads: torch has one state per process."""
        if self.switch is None:
            raise UserError(f"{self.display_name} cannot be switched in a running process", self._alternative(on))
        old_state = self.switch.read()
        self.switch.set(on)
        try:
            yield
        finally:
            self.switch.set(old_state)

    def _alternative(self, on: bool) -> str:
        if self.launcher:
            return f"start the process through `{' '.join(self.launcher)}`"
        if self.fresh.get(on):
            return "start the process with " + " ".join(f"{k}={v}" for k, v in self.fresh[on].items())
        return "it is part of this build of torch" if self.available else "nothing to do: it is not available here"


def _module(name: str) -> Any:
    return importlib.import_module(f"torch.backends.{name}")


def _property(name: str) -> Switch:
    """Make the switch of a module whose `enabled` is a property."""
    return Switch(lambda: bool(_module(name).enabled), lambda on: setattr(_module(name), "enabled", on))


MKLDNN = _property("mkldnn")
CUDNN = _property("cudnn")
OPT_EINSUM = _property("opt_einsum")
NNPACK = Switch(
    lambda: bool(importlib.import_module("torch")._C._get_nnpack_enabled()),
    lambda on: _module("nnpack").set_flags(on),
)
MHA = Switch(lambda: bool(_module("mha").get_fastpath_enabled()), lambda on: _module("mha").set_fastpath_enabled(on))
