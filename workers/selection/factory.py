"""Back ends by name, or the best that is here. What was asked for by name is never replaced without a word."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cluster.errors import UserError
from workers import backends
from workers.config import Given, PolyfleetConfig, config_of
from workers.device_info import DeviceInfo
from workers.errors import BackendUnavailable
from workers.selection import argument_checks, device_preference
from workers.selection.backend_type import BackendType

if TYPE_CHECKING:
    from workers.backends.base import BaseBackend

Name = str | BackendType
NOT_ENABLED = "the configuration does not enable it"
log = logging.getLogger("polyfleet")


class BackendFactory:
    """`create` is `get_backend` with a list of back ends to fall back to."""

    @staticmethod
    def create(
        backend_type: Name = BackendType.AUTO,
        config: Given = None,
        fallback_backends: Sequence[Name] | str | None = None,
        **given: Any,
    ) -> "BaseBackend":
        """The back end, `given` (device_id, optimization_level) being arguments of its class.

        AUTO is the best device of the machine that this process can use. A named back end that is absent raises
        BackendUnavailable with the reason and what is here; with `fallback_backends` the first of them that is
        available takes its place, which is logged and stays visible as `fallback_from` and `fallback_reason`.
        `config` may be a dict of options. Raises UserError for a word that is no back end, also among the fallbacks,
        and for an argument that is wrong, before anything is tried.
        """
        settings, (wanted,) = (
            config_of(config),
            argument_checks.check_backend_names("the back end", [str(backend_type)]),
        )
        others = (
            ()
            if fallback_backends is None
            else argument_checks.check_backend_names("fallback_backends", fallback_backends)
        )
        try:
            return _one(wanted, settings, given)
        except BackendUnavailable as e:
            if not others:
                raise
            return _instead(e, others, settings, given)

    @staticmethod
    def is_available(backend_type: Name) -> bool:
        return is_backend_available(backend_type)

    @staticmethod
    def get_all_backend_info() -> dict[str, dict[str, Any]]:
        """`get_backend_info` of every back end, by name."""
        return {name: get_backend_info(name) for name in backends.names()}


def get_backend(
    name: Name | None = None,
    config: Given = None,
    fallback_backends: Sequence[Name] | str | None = None,
    **given: Any,
) -> "BaseBackend":
    """The back end of that name, or the best that is here. See BackendFactory.create."""
    return BackendFactory.create(BackendType.AUTO if name is None else name, config, fallback_backends, **given)


def detect_best_backend(
    priority: Sequence[str] | str | None = None,
    workload: Mapping[str, float] | None = None,
    config: Given = None,
) -> str:
    """The name of the back end AUTO would take. `priority` overrules the configuration's; `workload` is measured
    throughput by kind (items per second). Raises BackendUnavailable when no enabled back end can be used, UserError for
    a word that is no back end or kind.
    """
    settings, rates = config_of(config), argument_checks.rates(workload)
    return _choose(
        settings, settings.priority if priority is None else argument_checks.check_names("priority", priority), rates
    )[0]


def list_available_backends() -> list[str]:
    """Names of back ends that can compute in this process. Imports torch and every vendor's library."""
    return list(backends.available())


def is_backend_available(name: Name) -> bool:
    """Raises UserError for a word that is no back end."""
    return not backends.unavailable_reason(str(name))


def get_backend_info(name: Name) -> dict[str, Any]:
    """available, class, reason (why not, "" when it is), version (of torch and the vendor's libraries), devices.

    `devices` are those of the machine, found without opening them, whether or not this process's torch can use them.
    Raises UserError for a word that is no back end.
    """
    found = backends.canonical(str(name))
    reason = backends.unavailable_reason(found)
    return {
        "type": found,
        "available": not reason,
        "class": _class_name(found),
        "reason": reason,
        "version": _versions(),
        "devices": [d for d in detected_devices() if d.backend == found],
    }


def _one(name: str, config: PolyfleetConfig, given: dict[str, Any]) -> "BaseBackend":
    return _best(config, given) if name == argument_checks.AUTO else _named(name, config, given)


def _named(name: str, config: PolyfleetConfig, given: dict[str, Any]) -> "BaseBackend":
    if name in backends.OWN and name not in config.backends:
        raise BackendUnavailable(name, NOT_ENABLED, config.backends)
    cls = backends.load(name)
    if reason := cls.unavailable_reason():
        raise BackendUnavailable(name, reason, config.backends)
    argument_checks.check_known(cls, given)
    return cls(config, **given)


def _instead(
    refused: BackendUnavailable, others: Sequence[str], config: PolyfleetConfig, given: dict[str, Any]
) -> "BaseBackend":
    reasons = [f"{refused.backend}: {refused.reason}"]
    for name in others:
        try:
            backend = _one(name, config, given)
        except BackendUnavailable as e:
            reasons.append(f"{e.backend}: {e.reason}")
            continue
        backend.fallback_from, backend.fallback_reason = refused.backend, refused.reason
        log.warning("%s takes the place of %s: %s", backend.BACKEND_NAME, refused.backend, refused.reason)
        return backend
    raise BackendUnavailable(refused.backend, f"nor any of its fallbacks ({'; '.join(reasons)})", config.backends)


def _best(config: PolyfleetConfig, given: dict[str, Any]) -> "BaseBackend":
    name, number = _choose(config, config.priority, {})
    cls = backends.load(name)
    argument_checks.check_known(cls, given)
    return cls(config, **({"device_id": number} | given))


def _choose(config: PolyfleetConfig, priority: Sequence[str], rates: Mapping[str, float]) -> tuple[str, int]:
    """(back end, number of its device): the best device whose back end works in this process."""
    found = detected_devices()
    order = device_preference.ranked(found, priority, rates)
    reasons: dict[str, str] = {}
    for device in order:
        if device.backend not in config.backends:
            reasons[device.backend] = NOT_ENABLED
        elif device.backend not in reasons:
            reasons[device.backend] = backends.unavailable_reason(device.backend)
        if not reasons[device.backend]:
            return device.backend, number(device)
    why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise BackendUnavailable("auto", why or "no device was found", config.backends)


def number(device: DeviceInfo) -> int:
    """torch's number of a usable device: `cuda:1` -> 1, `cpu` -> 0."""
    return int(device.device_type.partition(":")[2] or 0)


def detected_devices() -> list[DeviceInfo]:
    from workers.discovery.hardware import HardwareDetector

    return list(HardwareDetector().detect().devices)


def _class_name(name: str) -> str:
    try:
        return backends.load(name).__name__
    except UserError:
        return ""


def _versions() -> dict[str, str]:
    from workers.discovery.versions import versions

    return {name: number for name, number in versions().items() if name not in ("python", "polyfleet", "ray")}
