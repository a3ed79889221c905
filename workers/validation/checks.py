"""What can be said of a trace: dtypes, dynamic shapes and custom operators on a kind of device."""

import torch

from workers.backends.parts.precision import name_of
from workers.capability.matrix import Capabilities
from workers.validation.report import Problem
from workers.validation.tracing import Call, Trace

# Where torch registers kernels of a device. Composite kernels are made of other operators and run wherever those do.
KEYS = {"nvidia": "CUDA", "amd": "CUDA", "tpu": "XLA", "neuron": "XLA", "intel": "XPU", "apple": "MPS", "cpu": "CPU"}
COMPOSITE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
OF_TORCH = ("aten", "prim", "prims", "profiler", "_c10d_functional", "c10d", "quantized", "inductor", "higher_order")


def dtypes(trace: Trace, can: Capabilities) -> list[Problem]:
    """The first place of each dtype that this kind lacks, or computes with at a fraction of the speed."""
    found: dict[torch.dtype, Call] = {}
    for call in trace.calls:
        for dtype in call.dtypes:
            found.setdefault(dtype, call)
    return [p for dtype, call in found.items() if (p := _dtype(dtype, call, can))]


def _dtype(dtype: torch.dtype, call: Call, can: Capabilities) -> Problem | None:
    name = name_of(dtype)
    known = can.dtypes.get(name)
    if known is None or known.value in ("native", None):
        return None
    if known.value == "emulated":
        said = f"{name} is not native on {can.kind} ({known.label}): it is far slower"
        return Problem("warning", "dtypes", call.where, said, f"use {_instead(can)}")
    said = f"{can.kind} has no {name} ({known.label}), which {call.name} needs"
    return Problem("error", "dtypes", call.where, said, f"convert to {_instead(can)} there")


def _instead(can: Capabilities) -> str:
    return " or ".join(n for n in ("bfloat16", "float16", "float32") if can.native(n)) or "float32"


def dynamic_shapes(trace: Trace, can: Capabilities) -> list[Problem]:
    """Operators whose output shape, or whose result, depends on values. XLA compiles each new shape anew."""
    costly = str(can.dynamic_shapes.value).startswith("no")
    level = "error" if costly else "info"
    cost = "each new shape is compiled anew" if costly else "the host waits for the device there"
    found = {
        (call.name, call.where): Problem(
            level,
            "dynamic shapes",
            call.where,
            f"{call.name}: its result depends on values, {cost} on {can.kind}",
            "use torch.where, a mask kept at full size, or padding to a fixed size",
        )
        for call in trace.calls
        if {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(call.operator.tags)
    }
    if trace.needs_values:
        told = f"the forward branches on a tensor's value: {trace.stopped}"
        remedy = "compute both sides and choose with torch.where"
        found["", trace.last] = Problem("error" if costly else "warning", "dynamic shapes", trace.last, told, remedy)
    return list(found.values())


def custom_operators(trace: Trace, backend: str) -> list[Problem]:
    """Operators from outside torch that have no kernel for this device."""
    found: dict[str, Problem] = {}
    for call in trace.calls:
        name = call.name.partition(".")[0]
        if name.partition("::")[0] in OF_TORCH or _has_kernel(call, KEYS[backend]):
            continue
        here = [key for key in sorted(set(KEYS.values())) if _has_kernel(call, key)]
        told = f"{name} has kernels for {', '.join(here) or 'no device'}, none for {KEYS[backend]}"
        remedy = f"register one with torch.library for {KEYS[backend]}, or write it with torch's own operators"
        found.setdefault(name, Problem("error", "custom operators", call.where, told, remedy))
    return list(found.values())


def operators(trace: Trace, backend: str) -> list[Problem]:
    """Of torch's own, those without a kernel for this device in this build of torch."""
    missing: dict[str, Problem] = {}
    for call in (c for c in trace.calls if c.name.startswith("aten::")):
        if not _has_kernel(call, KEYS[backend]):
            told = f"{call.name} has no {KEYS[backend]} kernel in torch {torch.__version__}"
            missing.setdefault(
                call.name,
                Problem("error", "operators", call.where, told, "use other operators, or compute it on the CPU"),
            )
    return list(missing.values())


def _has_kernel(call: Call, key: str) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has(call.name, k) for k in (key, *COMPOSITE))
