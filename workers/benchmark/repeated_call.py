"""Repeat a call with the same inputs and, for a forward, the same state of the model.

Otherwise a call that overwrites its inputs would be timed on other values than the first, soon on infinities.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from cluster.errors import UserError
from workers.measurement.fingerprint import tensor_digest
from workers.measurement.inputs import Inputs, Sample, changed_names, digests
from workers.measurement.model_state import MODULE_ATTRIBUTES, SCALAR_TYPES, has_tensors, snapshots, tensors_in
from workers.measurement.timing import Refill

MAX_NAMED = 3


class RepeatedCall:
    """Repeat `call`, which is timed. `refill` must run before each `max_calls` calls, outside the timed part.

    `forward` is the model if calls must not change its state, None for training. `to_host` belongs to kernels, whose
    inputs may be in a driver's memory: such inputs are compared but not copied. Call `first`, then `detect_changes`,
    before any other method.
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
        self._changed_state: tuple[str, ...] = ()
        self._tensors = self._state
        self._unchanged: dict[str, str] = {}
        self._on_host = self._inputs_on_host()
        self._first_inputs = sample if to_host else self._inputs.first()

    def first(self) -> Any:
        return self._run(self._first_inputs)

    def detect_changes(self, second: Callable[[Callable[[], Any]], None]) -> dict[str, Any]:
        """Detect what calls change: inputs by the first call, and the model's state by one more, which `second` makes.

        State that only the first call fills in, such as a table of angles, need not be restored. Returns
        {"changed_in_place", "note"}, or {} if nothing changes. Raises UserError for a forward with changes that cannot
        be restored, and for kernels that change an input.
        """
        if self._to_host is None:
            self._inputs.compare()
        elif changed := changed_names(self._on_host, self._inputs_on_host()):
            raise UserError(f"the kernels change {', '.join(changed)} in place", "write their result to a new tensor")
        del self._first_inputs
        before = self._state.digests() if self._state else {}
        self._inputs.refill(1)
        second(lambda: self._run(self._inputs.next_input()))
        if self._state:
            self._changed_state = self._state.check(changed_names(before, self._state.digests()))
            if self._changed_state:
                self._state.restore()
            else:
                self._state = None
        changed = (*self._inputs.changed, *self._changed_state)
        self._unchanged = self._digests_of_unchanged()
        return {"changed_in_place": list(changed), "note": self._note(changed)} if changed else {}

    def check_unchanged(self) -> None:
        """Raise UserError if a call after the second changed an input, or a parameter or buffer of a forward.

        Run it after the timed part: it reads all tensors once.
        """
        if changed := changed_names(self._unchanged, self._digests_of_unchanged()):
            raise UserError(
                f"a later call changed {', '.join(changed[:MAX_NAMED])}, so the timed calls computed different results",
                "write to a new tensor, or make each call change the same ones",
            )

    def _digests_of_unchanged(self) -> dict[str, str]:
        """Digests of what the first two calls left as it was; a training may change its model."""
        inputs = {} if self._inputs.changed else self._inputs_on_host() or digests(self._sample)
        state = self._tensors.tensor_digests() if self._tensors else {}
        return inputs | {name: digest for name, digest in state.items() if name not in self._changed_state}

    @property
    def call(self) -> Callable[[], Any]:
        run, sample, inputs = self._run, self._sample, self._inputs
        return (lambda: run(inputs.next_input())) if inputs.changed else lambda: run(sample)

    @property
    def refill(self) -> Refill:
        return self._refill if self._inputs.changed or self._changed_state else None

    @property
    def max_calls(self) -> int | None:
        """Maximum calls per part (None: any number)."""
        if self._changed_state:
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
            "it was restored before each call, outside the timed part"
        )


class ModelState:
    """Snapshot of a model's parameters, buffers and plain attributes before its first call.

    Buffers and attributes can be restored: tensors, which are copied to the host, and numbers and flags, such as the
    position in a cache.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._tables = snapshots(model)
        self._containers = {
            name
            for name, value in self._attributes()
            if not isinstance(value, (Tensor, *SCALAR_TYPES)) and has_tensors(value)
        }

    def tensor_digests(self) -> dict[str, str]:
        """Digests of parameters and buffers by name."""
        parameters: dict[str, Tensor] = {f"parameter {_plain(name)}": p for name, p in self._model.named_parameters()}
        buffers: dict[str, Tensor] = {f"buffer {_plain(name)}": b for name, b in self._model.named_buffers()}
        return {name: tensor_digest(tensor) for name, tensor in (parameters | buffers).items()}

    def digests(self) -> dict[str, str]:
        """Digests of parameters, buffers and attributes that contain tensors, by name."""
        return self.tensor_digests() | {
            name: " ".join(map(tensor_digest, tensors_in(value)))
            for name, value in self._attributes()
            if has_tensors(value)
        }

    def check(self, changed: tuple[str, ...]) -> tuple[str, ...]:
        """Return `changed`. Raises UserError if it contains something that cannot be restored: a parameter, or the
        contents of an attribute that was already a list or an object before the first call.
        """
        fixed = [name for name in changed if name.startswith("parameter ") or name in self._containers]
        if fixed:
            raise UserError(
                f"each forward changes {', '.join(fixed[:MAX_NAMED])}, so two calls compute different results",
                "change parameters in training only, or register what changes as a buffer",
            )
        return changed

    def restore(self) -> None:
        for table in self._tables:
            table.restore()

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        """Iterate over (name, value) of all attributes that are not parameters, buffers or modules."""
        for path, module in self._model.named_modules():
            for name, value in vars(module).items():
                if name not in MODULE_ATTRIBUTES:
                    yield f"attribute {_plain(f'{path}.{name}'.lstrip('.'))}", value


def _plain(name: str) -> str:
    """Remove the wrapper of torch.compile from a name."""
    return name.replace("_orig_mod.", "")
