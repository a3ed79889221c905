"""Trace a backward pass in a forked child, so that autograd does not start in this process.

torch starts autograd's device threads at the first backward, for the devices that are open at that time. If torch-xla's
device is not open yet, every later backward on it fails ("device_ready_queues_", observed with torch 2.8). An estimate
is made before devices are opened, so where torch-xla is installed the trace runs in a child, which uses no device.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec

from cluster.errors import UserError
from workers.models.memory.estimate import MemoryEstimate

AUTOGRAD_ALREADY_STARTED = "autograd's threading in combination with fork"


def run_forked(trace: Callable[[], MemoryEstimate]) -> MemoryEstimate:
    """Call `trace`, in a forked child if torch-xla is installed. Return its result or raise its UserError."""
    if find_spec("torch_xla") is None or not hasattr(os, "fork"):
        return trace()
    result = json.loads(
        _in_child(trace) or '{"failed": "the child process that traced the model ended without a result"}'
    )
    if AUTOGRAD_ALREADY_STARTED in str(result):
        return trace()  # Autograd has already started in this process, so a child protects nothing.
    if "failed" in result:
        raise UserError(result["failed"], result.get("remedy", ""))
    return MemoryEstimate(**result)


def _in_child(trace: Callable[[], MemoryEstimate]) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(_outcome(trace)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def _outcome(trace: Callable[[], MemoryEstimate]) -> dict[str, object]:
    try:
        return asdict(trace())
    except UserError as e:
        return {"failed": e.message, "remedy": e.remedy}
    except Exception as e:
        return {"failed": f"tracing the model failed: {type(e).__name__}: {e}"}
