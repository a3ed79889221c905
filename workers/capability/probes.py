"""What a device answers when it is asked: each dtype computed with, attention in one kernel, a compiled function.

Probes open the device and take seconds: they run once per kind and set of library versions.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from cluster.paths import home
from workers.backends.base import BaseBackend
from workers.backends.parts.precision import dtype_of
from workers.capability.facts import FP8_FN, FP8_FNUZ
from workers.capability.matrix import FLOATS, PROBED, Capabilities, Known
from workers.optimizers.compiling import compiled_with, inductor
from workers.optimizers.work import Skip, Work, as_sample

SIZE = 256
TURNS = 7  # both dtypes by turns: what else runs on this machine then slows both alike
# A product in a dtype without units is converted or computed word by word: measured 177 times slower for float16 on a
# CPU with bfloat16 units. Natively, half the bits are never slower than float32 by this much.
EMULATED_FROM = 6.0
ASKED = "asked of the device"


def overruled(known: Capabilities, backend: BaseBackend) -> Capabilities:
    """`known` with what the device answers."""
    answers = answers_of(backend)
    dtypes = {name: Known(answer, PROBED, ASKED) for name, answer in answers["dtypes"].items()}
    native = {name for name, answer in answers["dtypes"].items() if answer == "native"}
    flavour = "fnuz" if native & set(FP8_FNUZ) else "fn" if native & set(FP8_FN) else "none"
    return replace(
        known,
        dtypes={**known.dtypes, **dtypes},
        flash_attention=Known(answers["flash_attention"], PROBED, ASKED),
        fp8_flavour=Known(flavour, PROBED, ASKED),
        compile=Known(answers["compile"], PROBED, ASKED),
        collectives=Known(backend.collective_backend, PROBED, ASKED),
    )


def answers_of(backend: BaseBackend) -> dict[str, Any]:
    """dtypes (name -> native, emulated, absent), flash_attention, compile. From the cache where it has them."""
    info = backend.get_device_info(backend.device_id)
    path = _path(info.kind, info.runtime_versions, str(info.properties.get("capability", "")))
    try:
        cached: dict[str, Any] = json.loads(path.read_text())
        if set(cached) == {"dtypes", "flash_attention", "compile"}:
            return cached
    except (OSError, ValueError):
        pass
    with backend:
        answers = {
            "dtypes": {name: _dtype(backend, name) for name in FLOATS if hasattr(torch, name)},
            "flash_attention": _flash(backend),
            "compile": _compiles(backend),
        }
    _keep(path, answers)
    return answers


def _path(kind: str, versions: dict[str, str], more: str) -> Path:
    told = hashlib.sha256(json.dumps([kind, versions, more], sort_keys=True).encode()).hexdigest()[:16]
    return home() / "capabilities" / f"{kind.replace(':', '-')}-{told}.json"


def _keep(path: Path, answers: dict[str, Any]) -> None:
    """Whole or not at all; a full disk costs a second probing, not the answer."""
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(answers))
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)


def _dtype(backend: BaseBackend, name: str) -> str:
    if not backend._round_trips(dtype_of(name)):
        return "absent"
    if name.startswith("float8"):  # torch multiplies them in scaled_mm only: units or none, nothing between
        return "native" if backend.supports_dtype(name) and backend.device.type == "cuda" else "emulated"
    if name == "float64":
        return "absent" if _product_s(backend, name) is None else "native"
    usual_name = "float64" if name == "complex128" else "float32"
    turns = [(_product_s(backend, name), _product_s(backend, usual_name)) for _ in range(TURNS)]
    slow = [mine for mine, _ in turns if mine is not None]
    usual = [other for _, other in turns if other is not None]
    if not slow:
        return "absent"
    return "native" if not usual or min(slow) <= EMULATED_FROM * min(usual) else "emulated"


def _product_s(backend: BaseBackend, name: str) -> float | None:
    """Seconds of a square product; None where there is no such product, or it is wrong."""
    try:
        a = torch.ones(SIZE, SIZE).to(dtype_of(name)).to(backend.device)
        backend.synchronize()
        begun = perf_counter()
        product = a @ a
        backend.synchronize()
        taken_s = perf_counter() - begun
        return taken_s if float(product[0, 0].cpu().real) == SIZE else None
    except (RuntimeError, TypeError, NotImplementedError):
        return None


def _flash(backend: BaseBackend) -> bool:
    dtype = torch.bfloat16 if backend.supports_dtype("bfloat16") else torch.float32
    query = torch.rand(1, 2, 64, 64).to(dtype).to(backend.device)
    return _works(lambda: _attend(query, backend))


def _attend(query: torch.Tensor, backend: BaseBackend) -> None:
    if backend.device.type == "xla":
        raise RuntimeError("torch's kernels are not XLA's")
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
    """The compiler that compiled a layer here, or why none did."""
    sample = backend.to_device(as_sample(torch.ones(2, 4)))
    work = Work(backend, torch.float32, False, sample)
    layer = backend.to_device(torch.nn.Linear(4, 4).eval())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compiled_with(layer, work, "openxla") if backend.device.type == "xla" else inductor(layer, work)
        except Skip as e:
            return f"none: {e}"
    return work.details["compile"]
