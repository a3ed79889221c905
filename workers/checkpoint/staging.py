"""Everything a load needs is brought into memory, verified and converted here, before any live object is touched."""

from collections.abc import Callable
from typing import Any

import torch

from workers.checkpoint import bits, tree
from workers.checkpoint.convert import convert
from workers.checkpoint.dtypes import dtype_name
from workers.checkpoint.manifest import DamagedCheckpoint, Entry
from workers.checkpoint.policy import Policy
from workers.checkpoint.reader import Reader
from workers.checkpoint.report import Report, TensorReport

Apply = Callable[[], None]
"""The second half of a load: what a stage returns once all its checks have passed."""


def read_tensor(reader: Reader, name: str) -> torch.Tensor:
    """A new tensor on the CPU, bit for bit and laid out as it was."""
    entry = reader.entry(name)
    tensor = torch.empty(entry.shape, dtype=bits.torch_dtype(entry.dtype))
    reader.read_into(name, bits.byte_view(tensor))  # bytes lie in logical order: the layout comes after
    return bits.lay_out(tensor, entry.layout) if entry.layout else tensor


class Stage:
    """Stored tensors, read once each, as the policy wants them. Raises CheckpointError naming the tensor."""

    def __init__(self, reader: Reader, policy: Policy, report: Report, device: torch.device):
        self.reader = reader
        self.policy = policy
        self.report = report
        self.device = device
        self._read: dict[str, torch.Tensor] = {}
        self._placed: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def entry(self, name: str) -> Entry:
        return self.reader.manifest.entries[name]

    def stored(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, bit for bit, laid out as it was; the same object for a name and its ties."""
        name = self._known(name)
        if name not in self._read:
            self._read[name] = read_tensor(self.reader, name)
        return self._read[name]

    def dtype(self, name: str) -> str:
        return self.reader.entry(self._known(name)).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self.reader.entry(self._known(name)).shape

    def wanted(self, name: str, device: torch.device) -> torch.dtype:
        """The dtype the policy gives a tensor that no live one receives."""
        return bits.torch_dtype(self.policy.wanted(name, self.dtype(name), device.type))

    def converted(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """On the CPU, as `dtype`; what that changed goes into the report. `device` is where it is meant for."""
        tensor, change = convert(name, self.stored(name), dtype)
        self.report.tensors[name] = TensorReport(
            tensor.nbytes, self.dtype(name), dtype_name(dtype), str(device), change
        )
        return tensor

    def placed(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A new tensor on `device`; the same object for a name and its ties."""
        key = (self._known(name), dtype, device)
        if key not in self._placed:
            self._placed[key] = self.converted(key[0], dtype, device).to(device)
        return self._placed[key]

    def value(self, encoded: Any, place: "Callable[[str], torch.Tensor] | None" = None) -> Any:
        """A JSON tree as values; `place` says what becomes of its tensors. Arrays are always numpy's, on the host."""
        place = place or (lambda name: self.placed(name, self.wanted(name, self.device), self.device))

        def leaf(name: str, tag: str) -> Any:
            return self.stored(name).numpy() if tag == "$array" else place(name)

        return tree.decode(encoded, leaf)

    def _known(self, name: Any) -> str:
        if not isinstance(name, str) or name not in self.reader.manifest.tensors:
            raise DamagedCheckpoint(f"the manifest refers to tensor {name!r}, which it does not list")
        return self.reader.manifest.resolve(name)
