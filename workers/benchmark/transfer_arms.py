"""Arms that move bytes: they have no model, and are checked by comparing what arrived."""

from typing import Any

import torch

from workers.backends.base import BaseBackend
from workers.benchmark.arm import Arm, Unsupported, block_shape, warm_up
from workers.benchmark.case import Case
from workers.benchmark.timing import Timer


def open_transfer(case: Case, backend: BaseBackend, timer: Timer) -> Arm:
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

    def up() -> Any:
        return target.copy_(host, non_blocking=pinned)

    call = up if name == "host-to-device" else copy
    call()
    backend.synchronize()
    arrived = bool(torch.equal(target.cpu(), host.cpu()))
    warmup_calls, call_s = warm_up(call, timer)
    calls, parts = block_shape(call_s, timer.overhead_s)
    accuracy = {"ok": arrived, "reason": "" if arrived else "what arrived is not what was sent"}
    facts = {"accuracy": accuracy, "warmup_calls": warmup_calls, "warm_call_s": call_s, "calls_per_part": calls,
             "pinned": pinned, "applied": [], "skipped": {}}  # fmt: skip
    return Arm(call, calls, parts, facts)
