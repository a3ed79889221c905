"""One execution library: what it is, whether it is here, its switch, and a proof. Importing this imports no torch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import UserError


@dataclass(frozen=True, slots=True)
class Switch:
    """A switch of the running process: how to read it and how to set it."""

    read: Callable[[], bool]
    set: Callable[[bool], Any]


@dataclass(frozen=True, slots=True)
class EffectCheck:
    """What was seen when the library's workload ran with it on or off: `effective` when that is what was wanted."""

    library: str
    wanted: bool
    effective: bool
    evidence: str


@dataclass(frozen=True, slots=True)
class Library:
    """`fresh` has the variables, by state, that a new process needs where there is no `switch`; a launcher is argv to
    put before the command. `prove` runs a workload as things are and tells whether the library computed it.
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
    seen: Callable[[], tuple[bool, str]] | None = None

    @property
    def available(self) -> bool:
        return not self.unavailable_reason()

    def require(self) -> None:
        """Raises UserError with the reason where it is not here."""
        if reason := self.unavailable_reason():
            raise UserError(f"{self.display_name} cannot be used here: {reason}", "`polyfleet backends --libraries`")

    def enable(self) -> AbstractContextManager[None]:
        """On inside a `with`, then as it was. Raises UserError where it is not here, or has no such switch."""
        self.require()
        return self._switched(True)

    def disable(self) -> AbstractContextManager[None]:
        """Off inside a `with`, then as it was. Raises UserError where it has no such switch."""
        return self._switched(False)

    @contextmanager
    def _switched(self, on: bool) -> Iterator[None]:
        """torch keeps these switches per process, not per thread: whoever computes meanwhile is switched too."""
        if self.switch is None:
            raise UserError(f"{self.display_name} cannot be switched in a running process", self._otherwise(on))
        before = self.switch.read()
        self.switch.set(on)
        try:
            yield
        finally:
            self.switch.set(before)

    def _otherwise(self, on: bool) -> str:
        if self.launcher:
            return f"start the process through `{' '.join(self.launcher)}`"
        if self.fresh.get(on):
            return "start the process with " + " ".join(f"{k}={v}" for k, v in self.fresh[on].items())
        return "it is part of this build of torch" if self.available else "it is not here"
