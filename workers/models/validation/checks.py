"""Checks of a trace for a kind of device: operators, dtypes, dynamic shapes and custom operators."""

import torch

from cluster import catalogue
from cluster.catalogue import EMULATED
from workers.devices.backends.precision import name_of
from workers.models.validation.matrix import Capabilities
from workers.models.validation.operator_trace import OperatorCall, OperatorTrace
from workers.models.validation.report import Problem

# Composite kernels consist of other operators and run wherever those run.
COMPOSITE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
DATA_MOVEMENT = frozenset(
    ("_to_copy", "copy", "copy_", "clone", "empty", "empty_like", "empty_strided", "new_empty", "zeros", "cat", "stack",
     "lift_fresh", "contiguous", "_unsafe_view")
)  # fmt: skip
TORCH_NAMESPACES = (
    "aten",
    "prim",
    "prims",
    "profiler",
    "_c10d_functional",
    "c10d",
    "quantized",
    "inductor",
    "higher_order",
)


def dtypes(trace: OperatorTrace, capabilities: Capabilities) -> list[Problem]:
    """Report each dtype that this kind lacks or emulates slowly, with the first call that computes in it.

    If no operator computes in the dtype, the finding names the first call that stores it.
    """
    computing: dict[torch.dtype, OperatorCall] = {}
    stored: dict[torch.dtype, OperatorCall] = {}
    for call in trace.calls:
        for dtype in call.dtypes:
            (stored if _is_data_movement(call) else computing).setdefault(dtype, call)
    return [
        p
        for dtype, call in (stored | computing).items()
        if (p := _dtype(dtype, call, capabilities, dtype in computing))
    ]


def _is_data_movement(call: OperatorCall) -> bool:
    """Return whether an operator only copies, converts or views: works in every dtype that the device can store."""
    if call.operator.is_view or call.name.startswith("prim::"):  # prim:: operators query the device
        return True
    return call.name.removeprefix("aten::").partition(".")[0] in DATA_MOVEMENT


def _dtype(dtype: torch.dtype, call: OperatorCall, capabilities: Capabilities, computes: bool) -> Problem | None:
    name = name_of(dtype)
    support, storage_error = capabilities.dtypes.get(name), _storage_errors(capabilities).get(name)
    if storage_error is None and (support is None or support.value in ("native", None)):
        return None
    if storage_error is None and support is not None and not computes:
        message = f"{name} is stored on {capabilities.kind} and converted to compute: no native units ({support.label})"
        return Problem("info", "dtypes", call.where, message, f"compute in {_alternatives(capabilities)}")
    if storage_error is None and support is not None and support.value == "emulated":
        message = f"{name} is not native on {capabilities.kind} ({support.label}): it is far slower"
        return Problem("warning", "dtypes", call.where, message, f"use {_alternatives(capabilities)}")
    message = (
        f"{capabilities.kind} has no {name} ({support.label if support else storage_error}), which {call.name} needs"
    )
    return Problem("error", "dtypes", call.where, message, f"convert to {_alternatives(capabilities)} there")


def _storage_errors(capabilities: Capabilities) -> dict[str, str]:
    """Return the dtypes that the kind's devices cannot store, each with the reason."""
    backend, _, model = capabilities.kind.partition(":")
    return catalogue.lossy_dtypes(catalogue.vendor(backend).torch_device, "" if model == EMULATED else backend)


def _alternatives(capabilities: Capabilities) -> str:
    return " or ".join(n for n in ("bfloat16", "float16", "float32") if capabilities.native(n)) or "float32"


def dynamic_shapes(trace: OperatorTrace, capabilities: Capabilities) -> list[Problem]:
    """Report operators whose output shape or result depends on values. XLA compiles again for each new shape."""
    costly = str(capabilities.dynamic_shapes.value).startswith("no")
    level = "error" if costly else "info"
    cost = "and XLA compiles again for each new shape" if costly else "so the host waits for the device there"
    problems = {
        (call.name, call.where): Problem(
            level,
            "dynamic shapes",
            call.where,
            f"the result of {call.name} depends on values, {cost} on {capabilities.kind}",
            "use torch.where, a full-size mask, or padding to a fixed size",
        )
        for call in trace.calls
        if {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(call.operator.tags)
    }
    if trace.needs_values:
        message = f"the forward branches on a tensor's value: {trace.stopped}"
        remedy = "compute both sides and choose with torch.where"
        problems["", trace.last] = Problem(
            "error" if costly else "warning", "dynamic shapes", trace.last, message, remedy
        )
    return list(problems.values())


def custom_operators(trace: OperatorTrace, key: str) -> list[Problem]:
    """Report operators from outside torch without a kernel for this device's dispatch key (`CUDA`, `XLA`)."""
    problems: dict[str, Problem] = {}
    for call in trace.calls:
        name = call.name.partition(".")[0]
        if name.partition("::")[0] in TORCH_NAMESPACES or _has_kernel(call, key):
            continue
        keys = {row.dispatch_key for row in catalogue.vendors().values() if row.dispatch_key}
        devices = [name for name in sorted(keys) if _has_kernel(call, name)]
        message = f"{name} has kernels for {', '.join(devices) or 'no device'}, none for {key}"
        remedy = f"register a kernel for {key} with torch.library, or write {name} with torch's own operators"
        problems.setdefault(name, Problem("error", "custom operators", call.where, message, remedy))
    return list(problems.values())


def operators(trace: OperatorTrace, key: str) -> list[Problem]:
    """Report torch's own operators that have no kernel for this device in this build of torch."""
    missing: dict[str, Problem] = {}
    for call in (c for c in trace.calls if c.name.startswith("aten::")):
        if not _has_kernel(call, key):
            message = f"{call.name} has no {key} kernel in torch {torch.__version__}"
            missing.setdefault(
                call.name,
                Problem(
                    "error", "operators", call.where, message, "use other operators, or compute this part on the CPU"
                ),
            )
    return list(missing.values())


def _has_kernel(call: OperatorCall, key: str) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(call.name, k) for k in (key, *COMPOSITE))
