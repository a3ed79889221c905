"""Choose kernels by name, or for each operation the fastest measured. Named kernels are never replaced silently."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cluster.errors import UserError
from workers import kernels as registry
from workers.errors import KernelsUnavailable, NotEnoughMemory

if TYPE_CHECKING:
    from workers.kernels.base import KernelBackend

AUTO = "auto"
log = logging.getLogger("polyfleet")


def init_kernels(
    name: str = AUTO,
    fallback: Sequence[str] | str | None = None,
    bytes_needed: int | None = None,
    device: Any = None,
    **options: Any,
) -> "KernelBackend":
    """Create the named kernels on `device` (None: their default), passing `options` to their class.

    "auto" uses, for each operation, dtype and class of shapes, the fastest correct implementation that `polyfleet
    kernels tune` has measured on this kind of device with this software, and torch's own if none was measured. Raises
    KernelsUnavailable, with the reason, if the kernels are not usable and no kernels in `fallback` are; otherwise the
    first usable fallback is used, which is logged and recorded in `fallback_from` and `fallback_reason`. Raises
    NotEnoughMemory if the device has less than `bytes_needed` free, and UserError, before anything is tried, for an
    unknown name, also among the fallbacks.
    """
    chosen, others = _check_name(name), _parse_fallbacks(fallback)
    try:
        kernels = _create(chosen, device, options)
    except KernelsUnavailable as e:
        if not others:
            raise
        kernels = _create_fallback(e, others, device)
    if bytes_needed is not None:
        _require_memory(kernels, bytes_needed)
    return kernels


def list_kernels() -> list[str]:
    """Return the names of kernels that can compute in this process. Imports torch and every driver's library."""
    return list(registry.available())


def get_kernels_info(name: str) -> dict[str, Any]:
    """Describe kernels as plain data: name, available, reason (why not available, or ""), interpreted, dtypes,
    gradients (operations whose backward they implement), flushes_subnormals, and the fields of `device_info`.
    """
    canonical_name = registry.resolve_name(name)
    reason = registry.unavailable_reason(canonical_name)
    if reason:
        return {"name": canonical_name, "available": False, "reason": reason}
    try:
        kernels = registry.create(canonical_name)
        about = kernels.device_info()
    except (UserError, KernelsUnavailable) as e:
        return {"name": canonical_name, "available": False, "reason": e.message}
    return {
        "name": canonical_name,
        "available": True,
        "reason": "",
        "interpreted": kernels.interpreted,
        "dtypes": list(kernels.dtype_names()),
        "gradients": sorted(kernels.own_gradients),
        "flushes_subnormals": kernels.flushes_subnormals,
        **about,
    }


def _check_name(name: str) -> str:
    return AUTO if str(name).lower() == AUTO else registry.resolve_name(name, (AUTO,))


def _parse_fallbacks(fallback: Sequence[str] | str | None) -> tuple[str, ...]:
    if fallback is None:
        return ()
    names = fallback.split(",") if isinstance(fallback, str) else fallback
    return tuple(_check_name(name.strip()) for name in names)


def _create(name: str, device: Any, options: dict[str, Any]) -> "KernelBackend":
    if name == AUTO:
        from workers.kernels.dispatch.fastest import Fastest

        return Fastest(device, **options)
    if name == "torch":
        from workers.kernels.dispatch.attention_choice import AttentionChoice

        options = {"choice": AttentionChoice()} | options
    return registry.create(name, device, **options)


def _create_fallback(error: KernelsUnavailable, names: Sequence[str], device: Any) -> "KernelBackend":
    reasons = [f"{error.kernels}: {error.reason}"]
    for name in names:
        try:
            kernels = _create(name, device, {})
        except KernelsUnavailable as e:
            reasons.append(f"{e.kernels}: {e.reason}")
            continue
        kernels.fallback_from, kernels.fallback_reason = error.kernels, error.reason
        log.warning("using kernels %s instead of %s: %s", name, error.kernels, error.reason)
        return kernels
    raise KernelsUnavailable(error.kernels, f"no fallback can be used either ({'; '.join(reasons)})")


def _require_memory(kernels: "KernelBackend", bytes_needed: int) -> None:
    """Raise NotEnoughMemory if the device of the arrays reports too little free memory."""
    if isinstance(bytes_needed, bool) or not isinstance(bytes_needed, int) or bytes_needed < 0:
        raise UserError(f"bytes_needed is {bytes_needed!r}", "write an integer of at least 0")
    free = kernels.free_bytes()
    if free is not None and free < bytes_needed:
        shortage = f"{kernels.device}: {free / 2**30:.2f} GiB free, {(bytes_needed - free) / 2**30:.2f} missing"
        raise NotEnoughMemory(bytes_needed, (shortage,))
