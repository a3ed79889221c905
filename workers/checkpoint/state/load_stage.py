"""Plan and check a load before any live object is changed.

No large data is read here. Tensors that the load creates are allocated, live ones are noted; tensors/tensor_fill.py
fills both later, once all names, shapes, hashes and losses have been checked.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from workers.checkpoint.conversion import bits
from workers.checkpoint.conversion.convert import check_convertible
from workers.checkpoint.conversion.dtype_policy import DtypePolicy
from workers.checkpoint.conversion.fp8 import scale_factor
from workers.checkpoint.conversion.load_report import ConversionLoss, LoadReport, TensorReport
from workers.checkpoint.disk.reader import CheckpointReader
from workers.checkpoint.format import tree
from workers.checkpoint.format.boxes import Box
from workers.checkpoint.format.dtypes import dtype_name
from workers.checkpoint.format.manifest import DamagedCheckpoint, StateEntry
from workers.checkpoint.tensors.tensor_fill import (
    Progress,
    TensorFill,
    copy_scaled,
    dry_run,
    fill,
    read_elements,
    read_new,
    view_of,
)
from workers.errors import CheckpointError

ELEMENTS_PER_PART = 1 << 19
"""Number of elements converted at a time."""
Apply = Callable[[], None]
"""A change of a live object, to be made once all checks have passed."""


class LoadStage:
    """Stored tensors and their targets. Raises CheckpointError naming the tensor."""

    def __init__(self, reader: CheckpointReader, policy: DtypePolicy, report: LoadReport, device: torch.device):
        self.reader = reader
        self.policy = policy
        self.report = report
        self.device = device
        self._new: list[TensorFill] = []
        self._live: list[TensorFill] = []
        self._read: dict[str, torch.Tensor] = {}
        self._created: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def entry(self, name: str) -> StateEntry:
        return self.reader.manifest.entries[name]

    def dtype(self, name: str) -> str:
        return self.reader.entry(self.stored_name(name)).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self.reader.entry(self.stored_name(name)).shape

    def read_now(self, name: str) -> torch.Tensor:
        """Read a small tensor now, verified, bit for bit on the CPU, e.g. a random state."""
        name = self.stored_name(name)
        if name not in self._read:
            self._read[name] = read_new(self.reader, name)
        return self._read[name]

    def target_dtype(self, name: str, device: torch.device) -> torch.dtype:
        """Return the policy's dtype for a tensor that is not loaded into a live one."""
        return bits.torch_dtype(self.policy.target_dtype(name, self.reader.entry(self.stored_name(name)), device.type))

    def fill_into(self, name: str, live: torch.Tensor, box: Box | None = None) -> None:
        """Fill a live tensor with the stored one, or with `box` of it."""
        self._note(self._live, self.stored_name(name), live, box)

    def plan_parts(self, name: str, dtype: torch.dtype) -> None:
        """Note a tensor that `copy_part` copies piece by piece, to count its losses; no target is allocated."""
        shape = self.reader.entry(name).shape
        self._note(self._live, name, torch.empty((), dtype=dtype).expand(shape))

    def copy_part(self, name: str, target: torch.Tensor, start: int, stop: int) -> None:
        """Copy elements of a noted tensor into a flat target of the noted dtype."""
        factor = next(tensor_fill.factor for tensor_fill in self._live if tensor_fill.name == name)
        for position in range(start, stop, ELEMENTS_PER_PART):
            end = min(position + ELEMENTS_PER_PART, stop)
            copy_scaled(
                target[position - start : end - start], read_elements(self.reader, name, position, end), factor, False
            )

    def new_tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a new tensor on `device`, filled by `fill_new`; a name and its ties get the same object."""
        name = self.stored_name(name)
        key = (name, dtype, device)
        if key not in self._created:
            view = self._view(name, dtype, device)
            self._created[key] = self._empty(name, dtype, device) if view is None else view
        return self._created[key]

    def value(self, encoded: Any, make_tensor: "Callable[[str], torch.Tensor] | None" = None) -> Any:
        """Decode a JSON tree; `make_tensor` maps its tensors' names. Arrays are always numpy's, on the host."""
        make_tensor = make_tensor or (
            lambda name: self.new_tensor(name, self.target_dtype(name, self.device), self.device)
        )

        def leaf(name: str, tag: str) -> Any:
            return self.read_now(name).numpy() if tag == "$array" else make_tensor(name)

        return tree.decode(encoded, leaf)

    def rescale(self) -> None:
        """Adjust the scale of fp8 tensors that change flavour. Raises CheckpointError if their scale is not loaded."""
        fills = (*self._new, *self._live)
        factors: dict[str, float] = {}
        for tensor_fill in fills:
            entry, target = self.reader.entry(tensor_fill.name), dtype_name(tensor_fill.target.dtype)
            factor = scale_factor(entry.dtype, target)
            if factor == 1.0:
                continue
            if entry.scale not in {other.name for other in fills}:
                raise CheckpointError(
                    f"{tensor_fill.name} is {entry.dtype} and would become {target}, where its bits mean"
                    f" {1 / factor:g} times the value; no scale that could compensate for it is loaded with it",
                    "keep its dtype, or load it as bfloat16",
                )
            factors[entry.scale] = factor
            self.report.notes.append(f"{entry.scale} times {factor:g}: the bits of {tensor_fill.name} are now {target}")
        for group in (self._new, self._live):
            group[:] = [replace(tensor_fill, factor=factors.get(tensor_fill.name, 1.0)) for tensor_fill in group]

    def verify_chunks(self, progress: Callable[[int, int], None] | None = None, everything: bool = False) -> None:
        """Verify all chunks that will be read (`everything`: all of the checkpoint)."""
        names = {self._stored_of(tensor_fill.name) for tensor_fill in (*self._new, *self._live)}
        chunks = {chunk for name in names for chunk in self.reader.chunks_of(name)}
        self.reader.verify_chunks(self.reader.all_chunks() if everything else chunks, progress)

    def size_bytes(self) -> int:
        """Bytes of all tensors that will be filled."""
        return sum(tensor_fill.target.nbytes for tensor_fill in (*self._new, *self._live))

    def count_losses(self) -> None:
        """Count in the report what conversions would change, without changing anything."""
        self._report_changes(dry_run(self.reader, (*self._new, *self._live)))

    def fill_new(self, progress: Progress | None = None) -> None:
        self._report_changes(fill(self.reader, self._new, progress))

    def fill_live(self, progress: Progress | None = None) -> None:
        with torch.no_grad():
            self._report_changes(fill(self.reader, self._live, progress))

    def stored_name(self, name: Any) -> str:
        """Return the name under which `name` is stored. Raises DamagedCheckpoint if the manifest has no such tensor."""
        if not isinstance(name, str) or name not in self.reader.manifest.tensors:
            raise DamagedCheckpoint(f"the manifest refers to tensor {name!r}, which it does not list")
        return self.reader.manifest.resolve(name)

    def _stored_of(self, name: str) -> str:
        return self.reader.manifest.tensors[name].alias_of or name

    def _empty(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        entry = self.reader.entry(name)
        tensor = bits.empty(entry.shape, dtype, entry.layout)
        if device.type != "cpu":
            tensor = torch.empty_like(tensor, device=device)
        self._note(self._new, name, tensor)
        return tensor

    def _view(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """On the CPU, return a view of the base tensor, so that shared memory is shared again; else None."""
        entry = self.reader.entry(name)
        if entry.view is None or device.type != "cpu" or self.reader.entry(entry.alias_of).layout:
            return None
        base = self.new_tensor(entry.alias_of, dtype, device)
        self._report(name, dtype, device)
        return view_of(base, entry.shape, entry.view.strides, entry.view.offset)

    def _note(self, fills: list[TensorFill], name: str, target: torch.Tensor, box: Box | None = None) -> None:
        check_convertible(name, bits.torch_dtype(self.dtype(name)), target.dtype)
        fills.append(TensorFill(name, target, box))
        self._report(name, target.dtype, target.device, target.nbytes)

    def _report(self, name: str, dtype: torch.dtype, device: torch.device, size_bytes: int = 0) -> None:
        self.report.tensors[name] = TensorReport(size_bytes, self.dtype(name), dtype_name(dtype), str(device))

    def _report_changes(self, changes: dict[str, ConversionLoss]) -> None:
        for name, change in changes.items():
            self.report.tensors[name] = replace(self.report.tensors[name], change=change)
