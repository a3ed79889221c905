"""What can be said of a trace: dtypes, dynamic shapes and custom operators on a kind of device."""

import torch

from cluster import catalogue
from cluster.catalogue import EMULATED
from workers.backends.parts.precision import name_of
from workers.capability.matrix import Capabilities
from workers.validation.operator_trace import OperatorCall, Trace
from workers.validation.report import Problem

# Composite kernels are made of other operators and run wherever those do.
COMPOSITE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
MOVING = frozenset(
    ("_to_copy", "copy", "copy_", "clone", "empty", "empty_like", "empty_strided", "new_empty", "zeros", "cat", "stack",
     "lift_fresh", "contiguous", "_unsafe_view")
)  # fmt: skip
OF_TORCH = ("aten", "prim", "prims", "profiler", "_c10d_functional", "c10d", "quantized", "inductor", "higher_order")


def dtypes(trace: Trace, can: Capabilities) -> list[Problem]:
    """The first place of each dtype that this kind lacks, or computes with at a fraction of the speed. Where nothing is
    computed in it, the first place where it is stored.
    """
    computing: dict[torch.dtype, OperatorCall] = {}
    stored: dict[torch.dtype, OperatorCall] = {}
    for call in trace.calls:
        for dtype in call.dtypes:
            (stored if _only_moves(call) else computing).setdefault(dtype, call)
    return [p for dtype, call in (stored | computing).items() if (p := _dtype(dtype, call, can, dtype in computing))]


def _only_moves(call: OperatorCall) -> bool:
    """Copies, converts or looks at: works in every dtype that the device can hold."""
    if call.operator.is_view or call.name.startswith("prim::"):  # those ask for the device
        return True
    return call.name.removeprefix("aten::").partition(".")[0] in MOVING


def _dtype(dtype: torch.dtype, call: OperatorCall, can: Capabilities, computes: bool) -> Problem | None:
    name = name_of(dtype)
    known, lost = can.dtypes.get(name), _lost(can).get(name)
    if lost is None and (known is None or known.value in ("native", None)):
        return None
    if lost is None and known is not None and not computes:
        said = f"{name} is stored on {can.kind} and converted to compute: it has no units for it ({known.label})"
        return Problem("info", "dtypes", call.where, said, f"compute in {_instead(can)}")
    if lost is None and known is not None and known.value == "emulated":
        said = f"{name} is not native on {can.kind} ({known.label}): it is far slower"
        return Problem("warning", "dtypes", call.where, said, f"use {_instead(can)}")
    said = f"{can.kind} has no {name} ({known.label if known else lost}), which {call.name} needs"
    return Problem("error", "dtypes", call.where, said, f"convert to {_instead(can)} there")


def _lost(can: Capabilities) -> dict[str, str]:
    """Dtypes that its devices cannot even hold."""
    backend, _, model = can.kind.partition(":")
    return catalogue.lossy_dtypes(catalogue.vendor(backend).torch_device, "" if model == EMULATED else backend)


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


def custom_operators(trace: Trace, key: str) -> list[Problem]:
    """Operators from outside torch that have no kernel where torch registers those of this device (`CUDA`, `XLA`)."""
    found: dict[str, Problem] = {}
    for call in trace.calls:
        name = call.name.partition(".")[0]
        if name.partition("::")[0] in OF_TORCH or _has_kernel(call, key):
            continue
        keys = {row.dispatch_key for row in catalogue.vendors().values() if row.dispatch_key}
        here = [name for name in sorted(keys) if _has_kernel(call, name)]
        told = f"{name} has kernels for {', '.join(here) or 'no device'}, none for {key}"
        remedy = f"register one with torch.library for {key}, or write it with torch's own operators"
        found.setdefault(name, Problem("error", "custom operators", call.where, told, remedy))
    return list(found.values())


def operators(trace: Trace, key: str) -> list[Problem]:
    """Of torch's own, those without a kernel for this device in this build of torch."""
    missing: dict[str, Problem] = {}
    for call in (c for c in trace.calls if c.name.startswith("aten::")):
        if not _has_kernel(call, key):
            told = f"{call.name} has no {key} kernel in torch {torch.__version__}"
            missing.setdefault(
                call.name,
                Problem("error", "operators", call.where, told, "use other operators, or compute it on the CPU"),
            )
    return list(missing.values())


def _has_kernel(call: OperatorCall, key: str) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has(call.name, k) for k in (key, *COMPOSITE))
