"""Errors that tasks, back ends and agents raise for users, with numbers and a remedy."""

from cluster.errors import Conflict, PolyfleetError, UserError


class OutOfDeviceMemory(UserError):
    """The device has less free memory than the task needs."""

    def __init__(self, device: str, needed_bytes: int, free_bytes: int):
        super().__init__(
            f"{device} has {free_bytes / 2**30:.1f} GiB free, the task needs {needed_bytes / 2**30:.1f}",
            "lower task.batch_size, or put a candidate with more memory first",
        )
        self.args = (device, needed_bytes, free_bytes)


class ControllerSuperseded(Conflict):
    """A call of a controller that is older than the newest one which has called this node."""

    def __init__(self, generation: int, newest: int):
        super().__init__(
            f"a newer controller (generation {newest}) has taken over this node; this one has generation {generation}",
            "stop the older server: `polyfleet server stop`",
        )
        self.args = (generation, newest)
        self.generation, self.newest = generation, newest


class EpochPast(Conflict):
    """A call for an attempt that was superseded or stopped.

    `newest`: the job's highest epoch that the node has received.
    """

    def __init__(self, message: str, newest: int):
        super().__init__(message)
        self.args = (message, newest)
        self.newest = newest


class KernelsUnavailable(UserError):
    """A requested implementation of kernels that this environment or machine does not have."""

    def __init__(self, kernels: str, reason: str, remedy: str = ""):
        super().__init__(f"kernels {kernels!r} are not available here: {reason}", remedy or LIST_KERNELS)
        self.args = (kernels, reason, remedy)
        self.kernels, self.reason = kernels, reason


class KernelsFailed(PolyfleetError):
    """A driver or compiler refused a kernel, or lost its device. The next call initialises the kernels again."""

    def __init__(self, kernels: str, reason: str, remedy: str):
        super().__init__(f"kernels {kernels!r} failed: {reason}", remedy)
        self.args = (kernels, reason, remedy)
        self.kernels, self.reason = kernels, reason


LIST_KERNELS = "run `polyfleet backends --kernels` to list the available ones"


class NativeUnavailable(UserError):
    """Compiled CPU code that is not available here. Callers continue without it, or report this error."""

    def __init__(self, reason: str):
        super().__init__(
            reason, "install g++, or name a C++ compiler in CXX; without one, slower implementations are used"
        )
        self.args = (reason,)
        self.reason = reason


class CheckpointError(UserError):
    """A checkpoint that cannot be saved, read or trusted; the message names file, tensor or chunk."""


class AttemptReplaced(CheckpointError):
    """This attempt was, or may have been, replaced by a newer one. Not an error of its code."""


class NonFiniteValue(UserError):
    """A value of a step that is NaN or infinite: further training and its checkpoints would be useless."""

    def __init__(self, what: str, step: int):
        super().__init__(
            f"{what} at step {step}",
            "check the learning rate and this step's data; `recovery: {on_events: {nan: ignore}}` continues training",
        )
        self.args = (what, step)


class NotEnoughMemory(UserError):
    """None of the requested devices has enough free memory. `reasons` has a sentence about each device."""

    def __init__(self, needed_bytes: int, reasons: "tuple[str, ...]"):
        super().__init__(
            f"{needed_bytes / 2**30:.2f} GiB are needed, but no device has that much free: {_join_reasons(reasons)}",
            "lower the batch size or the precision, or name more back ends",
        )
        self.args = (needed_bytes, reasons)


def _join_reasons(reasons: "tuple[str, ...]") -> str:
    return "; ".join(reasons) or "no device is available"
