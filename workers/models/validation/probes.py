"""Probe a device: the dtypes it computes with, flash attention, a compiled function.

Probes open the device and take seconds: they run once per kind and set of library versions.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from workers.devices.backends.base import BaseBackend
from workers.devices.backends.device_facts import kind
from workers.devices.backends.dtype_checks import supports_dtype
from workers.devices.capability import probe_cache
from workers.devices.capability.documented import FP8_FN, FP8_FNUZ
from workers.measurement.inputs import as_sample
from workers.models.passes.compilers import compile_model
from workers.models.passes.pass_context import PassContext, SkipPass
from workers.models.validation.matrix import FLOATS, PROBED, Capabilities, CapabilityValue

PROBE_SOURCE = "probed on the device"


def apply_probes(documented: Capabilities, backend: BaseBackend) -> Capabilities:
    """Return `documented` with the values that probes of the device replace."""
    results = probe_results(backend)
    dtypes = {name: CapabilityValue(support, PROBED, PROBE_SOURCE) for name, support in results["dtypes"].items()}
    native = {name for name, support in results["dtypes"].items() if support == "native"}
    flavour = "fnuz" if native & set(FP8_FNUZ) else "fn" if native & set(FP8_FN) else "none"
    return replace(
        documented,
        dtypes={**documented.dtypes, **dtypes},
        flash_attention=CapabilityValue(results["flash_attention"], PROBED, PROBE_SOURCE),
        fp8_flavour=CapabilityValue(flavour, PROBED, PROBE_SOURCE),
        compile=CapabilityValue(results["compile"], PROBED, PROBE_SOURCE),
        collectives=CapabilityValue(backend.collective_backend, PROBED, PROBE_SOURCE),
    )


def probe_results(backend: BaseBackend) -> dict[str, Any]:
    """Return dtypes (name -> native, emulated, absent), flash_attention and compile, cached or probed now."""
    dtypes = {name: backend.dtype_support(name) for name in FLOATS if hasattr(torch, name)}
    key = probe_cache.key(kind(backend))
    results = probe_cache.read(key)
    with backend:
        for name, probe in (("flash_attention", _flash), ("compile", _compiles)):
            if name not in results:
                results[name] = probe(backend)
                probe_cache.add(key, name, results[name])
    return {"dtypes": dtypes, "flash_attention": results["flash_attention"], "compile": results["compile"]}


def _flash(backend: BaseBackend) -> bool:
    dtype = torch.bfloat16 if supports_dtype(backend, "bfloat16") else torch.float32
    query = torch.rand(1, 2, 64, 64).to(dtype).to(backend.device)
    return _works(lambda: _attend(query, backend))


def _attend(query: torch.Tensor, backend: BaseBackend) -> None:
    if backend.device.type == "xla":
        raise RuntimeError("torch's attention kernels do not run on XLA")
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]), torch.no_grad():
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
        backend.synchronize()


def _works(call: Callable[[], None]) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except (RuntimeError, TypeError, NotImplementedError):
            return False
    return True


def _compiles(backend: BaseBackend) -> str:
    """Return the compiler that compiled a layer here, or "none: " and the reason."""
    sample = backend.to_device(as_sample(torch.ones(2, 4)))
    work = PassContext(backend, torch.float32, False, sample)
    layer = backend.to_device(torch.nn.Linear(4, 4).eval())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile_model(layer, work)
        except SkipPass as e:
            return f"none: {e}"
    return work.details["compile"]
