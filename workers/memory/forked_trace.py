"""Tracing a backward without starting autograd in this process.

torch starts autograd's device threads at the first backward, for the devices that are open by then. torch-xla's are
not: a backward before its device is opened makes every later one on it fail ("device_ready_queues_", seen with torch
2.8). Estimating comes before opening, so where torch-xla is installed the trace runs in a forked child, which touches
no device.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec

from cluster.errors import UserError
from workers.memory.estimate import MemoryEstimate

STARTED_HERE = "autograd's threading in combination with fork"


def run_forked(trace: Callable[[], MemoryEstimate]) -> MemoryEstimate:
    """What `trace` returns or the UserError it raises."""
    if find_spec("torch_xla") is None or not hasattr(os, "fork"):
        return trace()
    told = json.loads(_in_child(trace) or '{"failed": "the child that traced it ended without a word"}')
    if STARTED_HERE in str(told):
        return trace()  # autograd has started in this process already: nothing is left to keep apart
    if "failed" in told:
        raise UserError(told["failed"], told.get("remedy", ""))
    return MemoryEstimate(**told)


def _in_child(trace: Callable[[], MemoryEstimate]) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(_outcome(trace)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


def _outcome(trace: Callable[[], MemoryEstimate]) -> dict[str, object]:
    try:
        return asdict(trace())
    except UserError as e:
        return {"failed": e.message, "remedy": e.remedy}
    except Exception as e:
        return {"failed": f"tracing the model failed: {type(e).__name__}: {e}"}
