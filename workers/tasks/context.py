"""`Context`, the argument of a user's function `def train(ctx)`."""

import operator
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cluster.errors import UserError
from workers.devices import backends
from workers.devices.backends import random_state
from workers.devices.backends.base import BaseBackend
from workers.devices.backends.precision import precision_of
from workers.errors import NonFiniteValue
from workers.protocol.folders import SharedFolder
from workers.protocol.json_values import Number, metric, not_finite
from workers.protocol.rank_events import MAX_STEP
from workers.protocol.rank_progress import ProgressWriter
from workers.protocol.redaction import Redactor
from workers.tasks.checkpoints import CheckpointContext
from workers.tasks.data_loading import DeviceLoader
from workers.tasks.distributed import RankGroup, group
from workers.tasks.event_writer import RESERVED, Events
from workers.tasks.stop_flag import StopFlag


class Context:
    """One rank of one attempt, as the user's function receives it.

    Works without an agent, for example in a notebook: `Context(backends.create("cpu"))`.
    """

    def __init__(
        self,
        backend: BaseBackend,
        *,
        entry: str = "",
        arguments: dict[str, Any] | None = None,
        rank: int = 0,
        local_rank: int = 0,
        world_size: int = 1,
        precision: str = "",
        batch_size: int = 0,
        seed: int = 0,
        checkpoint_root: str = "",
        resume_from: str = "",
        keep_checkpoints: int = 3,
        kind: str = "",
        attempt: str = "",
        events_path: Path | None = None,
        beats_path: Path | None = None,
        stop_on_nan: bool = False,
        redact: Redactor | None = None,
    ):
        precision_of(precision)  # raises for an unknown name before anything is computed
        self.backend = backend
        self.entry = entry
        self.arguments = dict(arguments or {})
        self.rank, self.local_rank, self.world_size = rank, local_rank, world_size
        self.precision, self.batch_size, self.seed = precision, batch_size, seed
        self.kind, self.attempt = kind or backend.BACKEND_NAME, attempt
        self.checkpoint_root = checkpoint_root
        self.checkpoint = CheckpointContext(self, checkpoint_root, resume_from, keep_checkpoints)
        self.events = Events(events_path, rank, redact)
        self.progress = ProgressWriter(beats_path)
        self.stop = StopFlag()
        self.stop_on_nan = stop_on_nan
        self.non_finite_error: NonFiniteValue | None = None
        self.ranks = RankGroup(rank, 1)
        self.last_step = 0
        self.last_report: dict[str, Number] = {}

    @classmethod
    def from_attempt(cls, folder: Path, rank: int, order: dict[str, Any]) -> "Context":
        """Create the context of global rank `rank`, from the attempt's Order as plain data and torchrun's variables.

        Opens the device, seeds, and handles SIGTERM as a request to stop. Raises BackendUnavailable, UserError.
        """
        env = os.environ
        _choose_engine(order["kind"], order["emulated"])
        local_rank = int(env.get("LOCAL_RANK", 0))
        context = cls(
            backends.create(order["backend"], _device_index(order["backend"], local_rank)),
            entry=order["entry"],
            arguments=order["arguments"],
            rank=rank,
            local_rank=local_rank,
            world_size=int(env.get("WORLD_SIZE", 1)),
            precision=order["precision"],
            batch_size=order["batch_size"],
            seed=order["seed"],
            checkpoint_root=env.get("POLYFLEET_CHECKPOINT_DIR") or order["checkpoint_root"],
            resume_from=env.get("POLYFLEET_RESUME_FROM") or order["resume_from"],
            keep_checkpoints=order["keep_checkpoints"],
            kind=order["kind"],
            attempt=f"{order['job']}.{order['epoch']}",
            events_path=folder / "events.jsonl",
            beats_path=SharedFolder(folder).beat(rank),
            stop_on_nan=order["stop_on_nan"] and order["task"] == "train",
            redact=Redactor.for_rank(env),
        )
        context.stop.listen()
        random_state.seed(context.backend, context.seed + rank)
        return context

    @property
    def device(self) -> torch.device:
        return self.backend.device

    @property
    def preempted(self) -> bool:
        """True once a stop was requested: then save a checkpoint and return.

        Read it once per step; all ranks get the same value.
        """
        self.progress.record_step("poll")
        self._raise_non_finite()
        return self.stop.poll()

    @property
    def resumed(self) -> bool:
        """True if this attempt resumes from a checkpoint, which `ctx.checkpoint.restore` loads."""
        return bool(self.checkpoint.resume_from)

    @property
    def global_batch_size(self) -> int:
        """Batch size over all ranks; 0 if the job does not set one. It does not depend on the number of devices that a
        job with a range of devices received.
        """
        return self.batch_size * self.world_size

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        loader: Any = None,
        *,
        level: str = "O1",
    ) -> Any:
        """Move `model` (in place), `optimizer` and `loader` to the device; returns those passed, in this order.

        Tied parameters stay tied and the optimizer refers to the moved parameters, on every device. The model's forward
        uses the job's precision. With several ranks the model averages gradients, and the loader yields this rank's
        share of the batches. Batches are on the device.
        """
        if not isinstance(model, nn.Module):
            raise UserError(
                f"ctx.prepare received a {type(model).__name__}", "pass a torch.nn.Module as its first argument"
            )
        from workers.models import compat

        result = compat.prepare_training(self.backend, model, optimizer, self.precision, level, inplace=True)
        self.events.write("note", applied=result.applied, skipped=result.skipped)
        prepared: list[Any] = [self.backend.data_parallel(result.model) if self.ranks.is_distributed else result.model]
        if optimizer is not None:
            prepared.append(optimizer)
        if loader is not None:
            ranks = self.rank, self.ranks.world_size
            prepared.append(
                DeviceLoader(loader, self.backend, *ranks, self.seed, lambda: self.progress.record_step("batch"))
            )
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def autocast(self) -> AbstractContextManager[Any]:
        """Autocast context of the job's precision, for code outside a prepared model."""
        return self.backend.autocast(self.precision)

    def report(self, step: int, *, of: int | None = None, **metrics: Any) -> None:
        """Report metrics of this step to the fleet: one number per name, or a tensor with one element.

        `of` is the total number of steps. Raises NonFiniteValue for NaN or an infinite loss, unless the job ignores
        them.
        """
        if reserved := RESERVED & set(metrics):
            raise UserError(f"ctx.report: the metric name {min(reserved)!r} is reserved", "rename the metric")
        if not 0 <= step <= MAX_STEP:
            raise UserError(f"ctx.report received step {step}", f"use a step from 0 to {MAX_STEP}")
        self.last_step = int(step)
        total: dict[str, Number] = {} if of is None else {"of": _total(of, self.last_step)}
        values = {name: metric(name, value) for name, value in metrics.items()}
        self.last_report = {"step": self.last_step, **total, **values}
        self.events.write("report", **self.last_report)
        self.progress.record_step("report", self.last_step)
        if self.stop_on_nan and (bad := not_finite(metrics, self.last_report)):
            self.non_finite_error = NonFiniteValue(bad, self.last_step)
        self._raise_non_finite()

    def _raise_non_finite(self) -> None:
        """Raise the NonFiniteValue again if the user's code caught it the first time."""
        if self.non_finite_error is not None:
            raise self.non_finite_error

    @contextmanager
    def pause(self, what: str = "") -> Iterator[None]:
        """Do not expect progress during work outside steps, such as an evaluation.

        Every rank enters it, and all leave it together. `what` appears in the attempt's notes.
        """
        with self.progress.pause():
            self.events.write("note", pause=what)
            yield
            self.ranks.barrier()

    @contextmanager
    def running(self) -> Iterator["Context"]:
        """Enter the backend and the process group of the ranks. On exit all saves are durable."""
        with self.backend, group(self.backend, self.rank, self.world_size) as ranks:
            self.ranks = ranks
            self.stop.share(ranks.store)
            try:
                yield self
                self.checkpoint.wait()
            except NonFiniteValue:
                self.checkpoint.finish_saves()  # earlier saves are good: wait until they are written
                raise


def _total(of: Any, step: int) -> int:
    """Check the total number of steps. Raises UserError if it is invalid or less than `step`."""
    try:
        total = operator.index(of)
    except TypeError:
        total = 0
    if isinstance(of, bool) or not max(step, 1) <= total <= MAX_STEP:
        raise UserError(
            f"ctx.report received of={of!r} at step {step}",
            f"`of` is the total number of steps, from {max(step, 1)} to {MAX_STEP}; if it is a metric, rename it",
        )
    return total


def _choose_engine(kind: str, emulated: bool) -> None:
    """Set the environment variables that a kind implies, even if the pool's variables did not reach this process."""
    if emulated and kind.startswith("tpu"):
        os.environ.setdefault("PJRT_DEVICE", "CPU")
    if kind == "cpu:ipex":
        os.environ.setdefault("POLYFLEET_CPU_ENGINE", "ipex")


def _device_index(backend: str, local_rank: int) -> int:
    """Index of the device of a rank: its local rank, or 0 if the process sees only one device."""
    cls = backends.load(backend)
    return 0 if cls.unavailable_reason() else min(local_rank, max(cls.count_devices() - 1, 0))
