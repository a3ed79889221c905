"""Errors a task or a back end raises for the user, each with numbers and a remedy."""

from cluster.errors import Conflict, PolyfleetError, UserError


class OutOfDeviceMemory(UserError):
    def __init__(self, device: str, needed_bytes: int, free_bytes: int):
        super().__init__(
            f"{device} has {free_bytes / 2**30:.1f} GiB free, the task needs {needed_bytes / 2**30:.1f}",
            "lower task.batch_size, or put a candidate with more memory first",
        )
        self.args = (device, needed_bytes, free_bytes)


class ControllerSuperseded(Conflict):
    """An agent obeys no controller older than one that it has heard of."""

    def __init__(self, generation: int, seen: int):
        super().__init__(
            f"a newer controller (generation {seen}) has taken over this node; this one has generation {generation}",
            "stop the older server: `polyfleet server stop`",
        )
        self.args = (generation, seen)
        self.generation, self.seen = generation, seen


class EpochPast(Conflict):
    """An attempt that may not be started. `newest` is the highest epoch of its job known where it was refused."""

    def __init__(self, message: str, newest: int):
        super().__init__(message)
        self.args = (message, newest)
        self.newest = newest


class BackendUnavailable(UserError):
    """A backend that was asked for and that this environment or node does not have.

    `enabled` are those that the configuration enables, None being all. What can be used instead is looked up when the
    error is shown or sent elsewhere, not when it is raised: that imports every vendor's library.
    """

    _remedy: str

    def __init__(self, backend: str, reason: str, enabled: "tuple[str, ...] | None" = None):
        super().__init__(f"backend {backend!r} is not available here: {reason}")
        self.args = (backend, reason, enabled)
        self.backend, self.reason, self.enabled = backend, reason, enabled

    @property
    def available(self) -> "tuple[str, ...]":
        """Back ends that can compute in this process, and that the configuration enables."""
        return _usable(self.enabled)[0]

    @property
    def remedy(self) -> str:
        if not self._remedy:
            usable, disabled = _usable(self.enabled)
            off = f"; disabled by the configuration: {', '.join(disabled)}" if disabled else ""
            self._remedy = f"available here: {', '.join(usable) or 'none'}{off}"
        return self._remedy

    @remedy.setter
    def remedy(self, text: str) -> None:
        self._remedy = text

    def __reduce__(self) -> "tuple[type, tuple[object, ...], dict[str, object]]":
        """Another process has other back ends: what is here is told from here."""
        return type(self), self.args, vars(self) | {"_remedy": self.remedy}


def _usable(enabled: "tuple[str, ...] | None") -> "tuple[tuple[str, ...], tuple[str, ...]]":
    """Back ends that can compute in this process: those enabled, and those that the configuration leaves out."""
    from workers import backends

    found = backends.available()
    off = tuple(n for n in found if enabled is not None and n in backends.OWN and n not in enabled)
    return tuple(n for n in found if n not in off), off


class KernelsUnavailable(UserError):
    """An implementation of kernels that was asked for and that this environment or machine does not have."""

    def __init__(self, kernels: str, reason: str, remedy: str = ""):
        super().__init__(f"kernels {kernels!r} are not available here: {reason}", remedy or KERNELS_HERE)
        self.args = (kernels, reason, remedy)
        self.kernels, self.reason = kernels, reason


class KernelsFailed(PolyfleetError):
    """A driver or a compiler refused a kernel, or lost its device; the next call begins anew."""

    def __init__(self, kernels: str, reason: str, remedy: str):
        super().__init__(f"kernels {kernels!r} failed: {reason}", remedy)
        self.args = (kernels, reason, remedy)
        self.kernels, self.reason = kernels, reason


KERNELS_HERE = "`polyfleet backends --kernels` tells which are available"


class NativeUnavailable(UserError):
    """Compiled CPU code that cannot be had here; whoever asked for it goes on without, or says so."""

    def __init__(self, reason: str):
        super().__init__(reason, "install g++, or name a C++ compiler in CXX; without one the slower forms are used")
        self.args = (reason,)
        self.reason = reason


class CheckpointError(UserError):
    """A checkpoint that cannot be saved, read or trusted; names file, tensor or chunk."""


class AttemptReplaced(CheckpointError):
    """This attempt does not count any more, or may not: no fault of its code."""


class NonFiniteValue(UserError):
    """A number or a tensor of `step` that is NaN or infinite: training on is useless, and its checkpoints are too."""

    def __init__(self, what: str, step: int):
        super().__init__(
            f"{what} at step {step}",
            "look at the learning rate and the data of this step; recovery: {on_events: {nan: ignore}} trains on",
        )
        self.args = (what, step)


class NotEnoughMemory(UserError):
    """No device that was wanted has room. `looked` has a sentence per device."""

    def __init__(self, needed_bytes: int, looked: "tuple[str, ...]"):
        super().__init__(
            f"{needed_bytes / 2**30:.2f} GiB are needed, and no device has them free: {_listed(looked)}",
            "lower the batch size or the precision, or name more back ends",
        )
        self.args = (needed_bytes, looked)


def _listed(looked: "tuple[str, ...]") -> str:
    return "; ".join(looked) or "none was found"
