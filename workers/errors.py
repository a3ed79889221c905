"""Errors a task or a back end raises for the user, each with numbers and a remedy."""

from cluster.errors import UserError


class OutOfDeviceMemory(UserError):
    def __init__(self, device: str, needed_bytes: int, free_bytes: int):
        super().__init__(
            f"{device} has {free_bytes / 2**30:.1f} GiB free, the task needs {needed_bytes / 2**30:.1f}",
            "lower task.batch_size, or put a candidate with more memory first",
        )
        self.args = (device, needed_bytes, free_bytes)


class BackendUnavailable(UserError):
    """An explicitly named backend that this environment or node does not have."""

    def __init__(self, backend: str, reason: str, available: "tuple[str, ...]" = ()):
        super().__init__(
            f"backend {backend!r} is not available here: {reason}",
            f"available here: {', '.join(available) or 'none'}",
        )
        self.args = (backend, reason, available)
        self.backend, self.reason, self.available = backend, reason, available


class CheckpointError(UserError):
    """A checkpoint that cannot be saved, read or trusted; names file, tensor or chunk."""


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
