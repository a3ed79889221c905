"""What a user's function receives: `def train(ctx)`."""

import operator
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cluster.errors import UserError
from workers import backends
from workers.attempt.folders import SharedFolder
from workers.attempt.rank_progress import ProgressWriter
from workers.attempt.redaction import Redactor
from workers.backends.base import BaseBackend
from workers.backends.parts.precision import precision_of
from workers.errors import NonFiniteValue
from workers.rank_events import LARGEST_STEP
from workers.tasks.checkpoints import CheckpointContext
from workers.tasks.data_loading import DeviceLoader
from workers.tasks.distributed import RankGroup, group
from workers.tasks.event_writer import RESERVED, Events
from workers.tasks.json_values import Number, metric, not_finite
from workers.tasks.stop_flag import StopFlag


class Context:
    """One rank of one attempt. It needs no agent: in a notebook, `Context(backends.create("cpu"))` will do."""

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
        precision_of(precision)  # an unknown word is refused before anything is computed
        self.backend = backend
        self.entry = entry
        self.arguments = dict(arguments or {})
        self.rank, self.local_rank, self.world_size = rank, local_rank, world_size
        self.precision, self.batch_size, self.seed = precision, batch_size, seed
        self.kind, self.attempt = kind or backend.BACKEND_NAME, attempt
        self.checkpoint_root = checkpoint_root
        self.checkpoint = CheckpointContext(self, checkpoint_root, resume_from, keep_checkpoints)
        self.events = Events(events_path, rank, redact)
        self.beats = ProgressWriter(beats_path)
        self.stop = StopFlag()
        self.stop_on_nan = stop_on_nan
        self.poisoned: NonFiniteValue | None = None
        self.ranks = RankGroup(rank, 1)
        self.last_step = 0
        self.last_report: dict[str, Number] = {}

    @classmethod
    def from_attempt(cls, folder: Path, rank: int, order: dict[str, Any]) -> "Context":
        """The context of global rank `rank` of the attempt in `folder`, from its Order as plain data and torchrun's
        variables.

        Opens the device, seeds, and takes SIGTERM for ourselves. Raises BackendUnavailable, UserError.
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
            redact=Redactor.of_rank(env),
        )
        context.stop.listen()
        context.backend.seed(context.seed + rank)
        return context

    @property
    def device(self) -> torch.device:
        return self.backend.device

    @property
    def preempted(self) -> bool:
        """Asked to stop: save a checkpoint and return. Ask once per step; all ranks get the same answer."""
        self.beats.beat("poll")
        self._refuse_poison()
        return self.stop.poll()

    @property
    def resumed(self) -> bool:
        """This attempt goes on from a checkpoint: `ctx.checkpoint.restore` will return one."""
        return bool(self.checkpoint.resume_from)

    @property
    def global_batch_size(self) -> int:
        """Of all ranks together; 0 where the job says nothing. With a range of devices it is what the job says,
        whatever number of them it got.
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
        """Place `model` (in place), `optimizer` and `loader`; returns as many things as were given, in that order.

        The model's ties survive and the optimizer holds the parameters that are trained, on every device. A precision
        the job asks for is applied to the model's forward. With several ranks the model averages gradients, and the
        loader yields this rank's share of the batches. Batches come on the device.
        """
        if not isinstance(model, nn.Module):
            raise UserError(
                f"ctx.prepare was given a {type(model).__name__}", "its first argument is a torch.nn.Module"
            )
        done = self.backend.prepare_training(model, optimizer, self.precision, level, inplace=True)
        self.events.write("note", applied=done.applied, skipped=done.skipped)
        prepared: list[Any] = [self.backend.data_parallel(done.model) if self.ranks.many else done.model]
        if optimizer is not None:
            prepared.append(optimizer)
        if loader is not None:
            ranks = self.rank, self.ranks.world_size
            prepared.append(DeviceLoader(loader, self.backend, *ranks, self.seed, lambda: self.beats.beat("batch")))
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def autocast(self) -> AbstractContextManager[Any]:
        """For code outside a prepared model: the precision the job asks for."""
        return self.backend.autocast(self.precision)

    def report(self, step: int, *, of: int | None = None, **metrics: Any) -> None:
        """Tell the fleet numbers of this step: one number per name, tensors of one element included. `of` is how many
        steps the whole run has.

        Raises NonFiniteValue for one that makes going on useless, unless the job says that it is to be ignored.
        """
        if taken := RESERVED & set(metrics):
            raise UserError(
                f"ctx.report cannot take a metric called {min(taken)!r}", "the event has it already: rename it"
            )
        if not 0 <= step <= LARGEST_STEP:
            raise UserError(f"ctx.report was given step {step}", f"count steps from 0 to {LARGEST_STEP}")
        self.last_step = int(step)
        total: dict[str, Number] = {} if of is None else {"of": _total(of, self.last_step)}
        told = {name: metric(name, value) for name, value in metrics.items()}
        self.last_report = {"step": self.last_step, **total, **told}
        self.events.write("report", **self.last_report)
        self.beats.beat("report", self.last_step)
        if self.stop_on_nan and (bad := not_finite(metrics, self.last_report)):
            self.poisoned = NonFiniteValue(bad, self.last_step)
        self._refuse_poison()

    def _refuse_poison(self) -> None:
        """Also where the user's code has caught it the first time."""
        if self.poisoned is not None:
            raise self.poisoned

    @contextmanager
    def pause(self, what: str = "") -> Iterator[None]:
        """Around work that is no step, such as an evaluation: inside, no progress is expected. Every rank enters it,
        and all leave it together. `what` is told in the attempt's notes.
        """
        with self.beats.pause():
            self.events.write("note", pause=what)
            yield
            self.ranks.meet()

    @contextmanager
    def running(self) -> Iterator["Context"]:
        """Inside, the ranks know each other and the back end has its hooks. At its end all saves are durable."""
        with self.backend, group(self.backend, self.rank, self.world_size) as ranks:
            self.ranks = ranks
            self.stop.share(ranks.store)
            try:
                yield self
                self.checkpoint.wait()
            except NonFiniteValue:
                self.checkpoint.settle()  # what was saved before is good
                raise


def _total(of: Any, step: int) -> int:
    """Raises UserError for what is no number of steps, or less than the steps that were made."""
    try:
        total = operator.index(of)
    except TypeError:
        total = 0
    if isinstance(of, bool) or not max(step, 1) <= total <= LARGEST_STEP:
        raise UserError(
            f"ctx.report was given of={of!r} at step {step}",
            f"`of` is the number of steps of the whole run, from {max(step, 1)} to {LARGEST_STEP}; "
            "give a metric another name",
        )
    return total


def _choose_engine(kind: str, emulated: bool) -> None:
    """What a kind promises is asked for even where the pool's own variables did not reach this process."""
    if emulated and kind.startswith("tpu"):
        os.environ.setdefault("PJRT_DEVICE", "CPU")
    if kind == "cpu:ipex":
        os.environ.setdefault("POLYFLEET_CPU_ENGINE", "ipex")


def _device_index(backend: str, local_rank: int) -> int:
    """Each rank its own device; where a rank is shown one device only, that is number 0."""
    cls = backends.load(backend)
    return 0 if cls.unavailable_reason() else min(local_rank, max(cls.count_devices() - 1, 0))
