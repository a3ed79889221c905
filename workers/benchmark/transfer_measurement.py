"""Prepare cases that move bytes. They have no model; the check compares the bytes that arrived."""

from typing import Any

import torch

from workers.benchmark.cases.case import Case
from workers.benchmark.measurement import PreparedCase, Unsupported, warmed_up
from workers.devices.backends.base import BaseBackend
from workers.measurement.timing import Timer


def prepare_transfer(case: Case, backend: BaseBackend, timer: Timer) -> PreparedCase:
    name, count = case.definition.name, case.sizes["bytes"]
    host = torch.arange(count // 4, dtype=torch.float32)
    pinned = backend.device.type == "cuda"
    host = host.pin_memory() if pinned else host
    if name != "memory-copy" and backend.device.type == "cpu":
        raise Unsupported("the device's memory is the host's")
    device = backend.to_device(host.clone())
    backend.synchronize()
    target = torch.empty_like(
        device if name != "device-to-host" else host, pin_memory=pinned and name == "device-to-host"
    )

    def copy() -> Any:
        return target.copy_(device)

    def negate() -> Any:
        """Negate: a lazy device does not copy but shares memory. Negating reads and writes the same bytes."""
        return -device

    def up() -> Any:
        return target.copy_(host, non_blocking=pinned)

    lazy = name == "memory-copy" and backend.device.type == "xla"
    call = negate if lazy else up if name == "host-to-device" else copy
    first_call_s = timer.single_call_s(call)
    arrived = bool(torch.equal(-call().cpu() if lazy else target.cpu(), host.cpu()))
    accuracy = {"ok": arrived, "reason": "" if arrived else "the received bytes differ from those sent"}
    return warmed_up(
        call, timer, {"accuracy": accuracy, "first_call_s": first_call_s, "pinned": pinned, "by": call.__name__}
    )
