"""The same call again and again: on the same inputs and, for a forward, from the same parameters and buffers.

A call that changes its inputs in place would else be timed on something else than the first, soon on infinities.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cluster.errors import UserError
from workers.benchmark.timing import Refill
from workers.optimizers.fingerprint import tensor_digest
from workers.optimizers.inputs import Inputs, changed_names, digests
from workers.optimizers.work import Sample

MAX_NAMED = 3


class Repetition:
    """`call` is what is timed, `refill` what has to happen before each `max_calls` of it, outside the timed part.

    `forward` is the model where calls must leave its parameters and buffers as they are, None for training. `to_host`
    is that of kernels, whose inputs may lie in a driver's memory: they are compared, and not copied. Use: `first`,
    then `settle`, then the others.
    """

    def __init__(
        self,
        run: Callable[[Sample], Any],
        sample: Sample,
        forward: Any = None,
        to_host: Callable[[Any], Tensor] | None = None,
    ):
        self._run, self._sample, self._inputs, self._to_host = run, sample, Inputs(sample), to_host
        self._state = ModelState(forward) if isinstance(forward, nn.Module) else None
        self._changed_buffers: tuple[str, ...] = ()
        self._on_host = self._inputs_on_host()
        self._given = sample if to_host else self._inputs.first()

    def first(self) -> Any:
        return self._run(self._given)

    def settle(self, second: Callable[[Callable[[], Any]], None]) -> dict[str, Any]:
        """Compares inputs before and after the first call, and the model's state after it and after one more, which
        `second` makes: what only the first call fills in, such as a table of angles, needs no restoring.

        Returns {"changed_in_place", "note"}, or {} where nothing changes. Raises UserError for a forward that changes a
        parameter, and for kernels that change an input.
        """
        if self._to_host is None:
            self._inputs.compare()
        elif changed := changed_names(self._on_host, self._inputs_on_host()):
            raise UserError(
                f"the kernels change {', '.join(changed)} in place", "give their result a tensor of its own"
            )
        del self._given
        before = self._state.digests() if self._state else {}
        self._inputs.refill(1)
        second(lambda: self._run(self._inputs.take()))
        if self._state:
            self._changed_buffers = self._state.check(changed_names(before, self._state.digests()))
            if self._changed_buffers:
                self._state.restore()
            else:
                self._state = None
        changed = (*self._inputs.changed, *self._changed_buffers)
        return {"changed_in_place": list(changed), "note": self._note(changed)} if changed else {}

    @property
    def call(self) -> Callable[[], Any]:
        run, sample, inputs = self._run, self._sample, self._inputs
        return (lambda: run(inputs.take())) if inputs.changed else lambda: run(sample)

    @property
    def refill(self) -> Refill:
        return self._refill if self._inputs.changed or self._changed_buffers else None

    @property
    def max_calls(self) -> int | None:
        """Of one part; None: any number."""
        if self._changed_buffers:
            return 1
        return self._inputs.max_calls if self._inputs.changed else None

    def _inputs_on_host(self) -> dict[str, str]:
        if self._to_host is None:
            return {}
        return digests(Sample(tuple(map(self._to_host, self._sample.args)), {}))

    def _refill(self, calls: int) -> None:
        self._inputs.refill(calls)
        if self._state is not None:
            self._state.restore()

    def _note(self, changed: tuple[str, ...]) -> str:
        more = f" and {len(changed) - MAX_NAMED} more" if len(changed) > MAX_NAMED else ""
        return (
            f"the model changes {', '.join(changed[:MAX_NAMED])}{more} in place: "
            "each call got it as the first call had it, restored outside the timed part"
        )


class ModelState:
    """Parameters and buffers of a model before its first call. Buffers are kept on the host, to be restored."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._buffers = [
            (child._buffers, name, tensor, tensor.detach().cpu().clone())
            for child in model.modules()
            for name, tensor in child._buffers.items()
            if tensor is not None
        ]

    def digests(self) -> dict[str, str]:
        parameters = {f"parameter {_plain(name)}": p for name, p in self._model.named_parameters()}
        buffers = {f"buffer {_plain(name)}": b for name, b in self._model.named_buffers()}
        tensors: dict[str, Tensor] = {**parameters, **buffers}
        return {name: tensor_digest(tensor) for name, tensor in tensors.items()}

    @staticmethod
    def check(changed: tuple[str, ...]) -> tuple[str, ...]:
        """`changed` itself. Raises UserError where a parameter is in it."""
        parameters = [name for name in changed if name.startswith("parameter ")]
        if parameters:
            raise UserError(
                f"each forward changes {', '.join(parameters[:MAX_NAMED])}: two calls do not compute the same",
                "change parameters in training only, or register what changes as a buffer",
            )
        return changed

    def restore(self) -> None:
        with torch.no_grad():
            for table, name, tensor, before in self._buffers:
                table[name] = tensor  # a forward may also put another tensor in its place
                tensor.copy_(before)


def _plain(name: str) -> str:
    """Without the wrapper of torch.compile."""
    return name.replace("_orig_mod.", "")
