"""Kernels by name, or for each operation the fastest that was measured. What was asked for by name is never replaced
without a word.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cluster.errors import UserError, nearest
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
    """The kernels of that name on `device` (None: the one of their own), `options` being arguments of their class.

    "auto" takes for each operation, dtype and class of shapes the fastest right implementation that `polyfleet kernels
    tune` has measured on this kind of device with this software, and torch's own where none was. Kernels that are
    absent raise KernelsUnavailable with the reason; with `fallback` the first of these that is available takes their
    place, which is logged and stays visible as `fallback_from` and `fallback_reason`. Raises NotEnoughMemory where
    the device has less than `bytes_needed` free, UserError for a word that names no kernels, also among the
    fallbacks, before anything is tried.
    """
    wanted, others = _checked(name), _others(fallback)
    try:
        found = _made(wanted, device, options)
    except KernelsUnavailable as e:
        if not others:
            raise
        found = _instead(e, others, device, options)
    if bytes_needed is not None:
        _require_memory(found, bytes_needed)
    return found


def list_kernels() -> list[str]:
    """Names of kernels that can compute in this process. Imports torch and every driver's library."""
    return list(registry.available())


def get_kernels_info(name: str) -> dict[str, Any]:
    """name, available, reason (why not, "" when they are), interpreted, dtypes, gradients (operations whose backward
    they compute themselves), flushes_subnormals, and what `device_info` tells. Plain data.
    """
    found = registry.canonical(name)
    reason = registry.unavailable_reason(found)
    if reason:
        return {"name": found, "available": False, "reason": reason}
    try:
        made = registry.create(found)
        about = made.device_info()
    except (UserError, KernelsUnavailable) as e:
        return {"name": found, "available": False, "reason": e.message}
    return {
        "name": found,
        "available": True,
        "reason": "",
        "interpreted": made.interpreted,
        "dtypes": list(made.dtype_names()),
        "gradients": sorted(made.own_gradients),
        "flushes_subnormals": made.flushes_subnormals,
        **about,
    }


def _checked(name: str) -> str:
    if str(name).lower() == AUTO:
        return AUTO
    if str(name).lower() not in registry.names():
        raise UserError(f"unknown kernels {name!r}", nearest(str(name), (AUTO, *registry.names())))
    return registry.canonical(name)


def _others(given: Sequence[str] | str | None) -> tuple[str, ...]:
    if given is None:
        return ()
    words = given.split(",") if isinstance(given, str) else given
    return tuple(_checked(word.strip()) for word in words)


def _made(name: str, device: Any, options: dict[str, Any]) -> "KernelBackend":
    if name == AUTO:
        from workers.kernels.parts.fastest import Fastest

        return Fastest(device, **options)
    return registry.create(name, device, **options)


def _instead(
    refused: KernelsUnavailable, others: Sequence[str], device: Any, options: dict[str, Any]
) -> "KernelBackend":
    reasons = [f"{refused.kernels}: {refused.reason}"]
    for name in others:
        try:
            found = _made(name, device, {})
        except KernelsUnavailable as e:
            reasons.append(f"{e.kernels}: {e.reason}")
            continue
        found.fallback_from, found.fallback_reason = refused.kernels, refused.reason
        log.warning("kernels %s take the place of %s: %s", name, refused.kernels, refused.reason)
        return found
    raise KernelsUnavailable(refused.kernels, f"nor any of the fallbacks ({'; '.join(reasons)})")


def _require_memory(kernels: "KernelBackend", bytes_needed: int) -> None:
    """Of the device of the arrays; what does not tell its free memory is not refused."""
    if isinstance(bytes_needed, bool) or not isinstance(bytes_needed, int) or bytes_needed < 0:
        raise UserError(f"bytes_needed is {bytes_needed!r}", "give a whole number of at least 0")
    free = kernels.free_bytes()
    if free is not None and free < bytes_needed:
        told = f"{kernels.device}: {free / 2**30:.2f} GiB free, {(bytes_needed - free) / 2**30:.2f} missing"
        raise NotEnoughMemory(bytes_needed, (told,))
