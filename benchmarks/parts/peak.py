"""One case of memory_estimate.py, in a process of its own: what a model really takes, and what was estimated.

    python benchmarks/parts/peak.py MODEL MODE EXECUTION        prints one JSON object

Real is resident memory above that of the process warmed up with a tiny model of the same kind. The kernel keeps the
highest value (VmHWM); writing 5 to /proc/self/clear_refs sets it back to the present one (man 5 proc). Linux only.
"""

import ctypes
import gc
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import torch  # noqa: E402
from models import build  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from workers.models.memory.estimate import estimate_memory  # noqa: E402

# What 23 GiB hold on two cores in a minute.
SIZES: dict[str, dict[str, int]] = {"mlp": {}, "resnet50": {}, "gpt2": {"batch": 2, "seq": 512}, "bert": {}}
STEPS = 3


def loss(scores: torch.Tensor) -> torch.Tensor:
    """Cross-entropy against class 0."""
    flat = scores.reshape(-1, scores.shape[-1])
    return F.cross_entropy(flat, torch.zeros(len(flat), dtype=torch.long, device=flat.device))


class Place:
    """Eager on the CPU, or XLA's compiler on the CPU."""

    def __init__(self, execution: str):
        self.device = torch.device("cpu")
        self._wait: Callable[[], Any] = lambda: None
        if execution == "xla":
            from workers.devices.backends.vendors.tpu import TPUBackend

            backend = TPUBackend()
            self.device, self._wait = backend.device, backend.synchronize

    def put(self, model: nn.Module, sample: Any) -> tuple[nn.Module, Any]:
        if self.device.type == "cpu":
            return model, sample
        from workers.devices.backends.device_transfer import move_module

        move_module(model, self.device)
        moved = sample.to(self.device)
        self._wait()
        return model, moved

    def wait(self) -> None:
        self._wait()
        gc.collect()


def kept_and_peak(place: Place, name: str, mode: str, small: bool) -> tuple[int, int]:
    """Resident bytes: after the last step, when only weights and state are left and the allocator was told to give
    back what is free, and at the highest in that step, when it was not.
    """
    model, sample = place.put(*build(name, small=small, **({} if small else SIZES[name])))
    place.wait()
    optimizer = torch.optim.AdamW(model.parameters()) if mode == "training" else None
    model.train(optimizer is not None)
    for _ in range(STEPS):
        set_back()
        output = call(model, sample, optimizer)  # held: what nobody holds a lazy device does not compute
        place.wait()
        peak = status("VmHWM")
        del output
        model.zero_grad()
    place.wait()
    trim()
    return status("VmRSS"), peak


def call(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer | None) -> Any:
    if optimizer is None:
        with torch.no_grad():
            return model(sample)
    loss(model(sample)).backward()
    optimizer.step()
    return None


def trim() -> None:
    """glibc keeps freed memory for later; other C libraries have no such call."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


def status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def set_back() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main(name: str, mode: str, execution: str) -> None:
    with torch.device("meta"):
        model, sample = build(name, **SIZES[name])
    told = estimate_memory(model, sample_input=sample, mode=mode, loss=loss, execution=execution)
    place = Place(execution)
    kept_and_peak(place, name, mode, small=True)
    place.wait()
    trim()
    before = status("VmRSS")
    kept, peak = kept_and_peak(place, name, mode, small=False)
    parts = ("weights", "gradients", "optimizer_state", "activations", "workspace", "total")
    print(
        json.dumps(
            {
                "torch": torch.__version__,
                "input_shape": list(sample.shape),
                "estimated": {part: getattr(told, f"{part}_bytes") for part in parts} | {"peak_in": told.peak},
                "resident": {"kept": kept - before, "peak": peak - before},
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
