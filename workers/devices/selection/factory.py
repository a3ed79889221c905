"""Create backends by name, or the best available one. A named backend is never replaced silently."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cluster.errors import UserError
from workers.devices import backends
from workers.devices.backends import BackendUnavailable
from workers.devices.backends.user_methods import record_fallback
from workers.devices.capability.device_info import DeviceInfo
from workers.devices.selection import argument_checks
from workers.devices.selection.argument_checks import BackendType
from workers.options import device_preference
from workers.options.config import ConfigLike, PolyfleetConfig, config_of

if TYPE_CHECKING:
    from workers.devices.backends.base import BaseBackend

Name = str | BackendType
NOT_ENABLED = "the configuration does not enable it"
log = logging.getLogger("polyfleet")


class BackendFactory:
    """Create and describe backends: the functions of this module, as a class."""

    @staticmethod
    def create(
        backend_type: Name = BackendType.AUTO,
        config: ConfigLike = None,
        fallback_backends: Sequence[Name] | str | None = None,
        **arguments: Any,
    ) -> "BaseBackend":
        """Create a backend; `arguments` (device_id, optimization_level) are passed to its class.

        AUTO chooses the best device of the machine that this process can use. An unavailable backend raises
        BackendUnavailable with the reason and the available ones; with `fallback_backends` the first available of them
        is created instead, which is logged and recorded in its `fallback_from` and `fallback_reason`. `config` may be a
        dict of options. Raises UserError for an unknown backend, also among the fallbacks, and for an invalid argument,
        before any backend is tried.
        """
        settings, (requested,) = (
            config_of(config),
            argument_checks.check_backend_names("the backend", [str(backend_type)]),
        )
        fallbacks = (
            ()
            if fallback_backends is None
            else argument_checks.check_backend_names("fallback_backends", fallback_backends)
        )
        try:
            return _create(requested, settings, arguments)
        except BackendUnavailable as e:
            if not fallbacks:
                raise
            return _create_fallback(e, fallbacks, settings, arguments)

    @staticmethod
    def is_available(backend_type: Name) -> bool:
        return is_backend_available(backend_type)

    @staticmethod
    def get_all_backend_info() -> dict[str, dict[str, Any]]:
        """Return `get_backend_info` of every backend, by name."""
        return {name: get_backend_info(name) for name in backends.names()}


def get_backend(
    name: Name | None = None,
    config: ConfigLike = None,
    fallback_backends: Sequence[Name] | str | None = None,
    **arguments: Any,
) -> "BaseBackend":
    """Create the named backend, or the best available one. See BackendFactory.create."""
    return BackendFactory.create(BackendType.AUTO if name is None else name, config, fallback_backends, **arguments)


def detect_best_backend(
    priority: Sequence[str] | str | None = None,
    workload: Mapping[str, float] | None = None,
    config: ConfigLike = None,
) -> str:
    """Name of the backend that AUTO would choose.

    `priority` overrides the configuration's; `workload` is measured throughput by kind (items per second). Raises
    BackendUnavailable if no enabled backend can be used, UserError for an unknown backend or kind.
    """
    settings, rates = config_of(config), argument_checks.rates(workload)
    return _choose_device(
        settings, settings.priority if priority is None else argument_checks.check_names("priority", priority), rates
    )[0]


def list_available_backends() -> list[str]:
    """Names of backends that can compute in this process. Imports torch and every vendor's library."""
    return list(backends.available())


def is_backend_available(name: Name) -> bool:
    """Return whether a backend can be used in this process. Raises UserError for an unknown name."""
    return not backends.unavailable_reason(str(name))


def get_backend_info(name: Name) -> dict[str, Any]:
    """Describe a backend: type, available, class, reason (if unavailable), version (of its libraries), devices.

    `devices` are all of the machine's, detected without opening them, whether or not this process's torch can use them.
    Raises UserError for an unknown name.
    """
    resolved = backends.canonical(str(name))
    reason = backends.unavailable_reason(resolved)
    return {
        "type": resolved,
        "available": not reason,
        "class": _class_name(resolved),
        "reason": reason,
        "version": _versions(),
        "devices": [d for d in detected_devices() if d.backend == resolved],
    }


def _create(name: str, config: PolyfleetConfig, arguments: dict[str, Any]) -> "BaseBackend":
    return _create_best(config, arguments) if name == argument_checks.AUTO else _create_named(name, config, arguments)


def _create_named(name: str, config: PolyfleetConfig, arguments: dict[str, Any]) -> "BaseBackend":
    if name in backends.BUILTIN and name not in config.backends:
        raise BackendUnavailable(name, NOT_ENABLED, config.backends)
    cls = backends.load(name)
    if reason := cls.unavailable_reason():
        raise BackendUnavailable(name, reason, config.backends)
    argument_checks.check_keywords(cls, arguments)
    return cls(config, **arguments)


def _create_fallback(
    unavailable: BackendUnavailable, fallbacks: Sequence[str], config: PolyfleetConfig, arguments: dict[str, Any]
) -> "BaseBackend":
    reasons = [f"{unavailable.backend}: {unavailable.reason}"]
    for name in fallbacks:
        try:
            backend = _create(name, config, arguments)
        except BackendUnavailable as e:
            reasons.append(f"{e.backend}: {e.reason}")
            continue
        record_fallback(backend, unavailable.backend, unavailable.reason)
        log.warning("%s is used instead of %s: %s", backend.BACKEND_NAME, unavailable.backend, unavailable.reason)
        return backend
    raise BackendUnavailable(
        unavailable.backend, f"none of its fallbacks is available either ({'; '.join(reasons)})", config.backends
    )


def _create_best(config: PolyfleetConfig, arguments: dict[str, Any]) -> "BaseBackend":
    name, number = _choose_device(config, config.priority, {})
    cls = backends.load(name)
    argument_checks.check_keywords(cls, arguments)
    return cls(config, **({"device_id": number} | arguments))


def _choose_device(config: PolyfleetConfig, priority: Sequence[str], rates: Mapping[str, float]) -> tuple[str, int]:
    """Choose the best device whose backend works in this process: (backend, number of its device)."""
    devices = detected_devices()
    best_first = device_preference.ranked(devices, priority, rates)
    reasons: dict[str, str] = {}
    for device in best_first:
        if device.backend not in config.backends:
            reasons[device.backend] = NOT_ENABLED
        elif device.backend not in reasons:
            reasons[device.backend] = backends.unavailable_reason(device.backend)
        if not reasons[device.backend]:
            return device.backend, torch_index(device)
    causes = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise BackendUnavailable("auto", causes or "no device is available", config.backends)


def torch_index(device: DeviceInfo) -> int:
    """Torch's number of a usable device: `cuda:1` -> 1, `cpu` -> 0."""
    return int(device.device_type.partition(":")[2] or 0)


def detected_devices() -> list[DeviceInfo]:
    from workers.devices.capability.hardware import HardwareDetector

    return list(HardwareDetector().detect().devices)


def _class_name(name: str) -> str:
    try:
        return backends.load(name).__name__
    except UserError:
        return ""


def _versions() -> dict[str, str]:
    from workers.devices.discovery.versions import versions

    return {name: number for name, number in versions().items() if name not in ("python", "polyfleet", "ray")}
