"""Names that users call on a back end and that its contract does not have: each is a function over a back end.

`backend.prepare_model(model)` calls `prepare_model(backend, model)` of workers/models/compat.py. Our own code calls the
functions, which mypy checks. The table names them by text and they are imported on first use: nothing here imports a
higher folder.
"""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from workers.devices.backends.base import BaseBackend

Function = TypeVar("Function", bound=Callable[..., Any])

FUNCTIONS: dict[str, tuple[str, ...]] = {
    "workers.models.compat": (
        "optimize_for_inference",
        "optimize_for_training",
        "prepare",
        "prepare_model",
        "prepare_model_with_custom_kernels",
        "prepare_training",
    ),
    "workers.devices.backends.device_facts": (
        "device_count",
        "device_name",
        "get_all_devices",
        "is_available",
        "kind",
        "max_memory_bytes",
        "max_shared_memory_bytes",
        "precision",
    ),
    "workers.devices.backends.dtype_checks": ("require_dtype", "supported_dtypes", "supports_dtype"),
    "workers.devices.backends.random_state": ("accepts_rng_state", "rng_state", "rng_type", "seed", "set_rng_state"),
}
PROPERTIES = {"device_count", "device_name", "is_available", "kind", "precision", "rng_type"}
"""Names whose function takes the back end alone and which users read without calling them."""


class UserMethods:
    """Base of every back end except BaseBackend: the names of FUNCTIONS, which a back end may override like any method.

    A class and not `__getattr__`, so that `super().prepare_model(model)` works, and `dir`, `help` and completion list
    the names.
    """

    report: Any = None
    """What the last preparation applied, and what it skipped for which reason: a PreparedModel."""
    fallback_from: str = ""
    """The back end that was requested, if this one is used instead; `fallback_reason` says why."""
    fallback_reason: str = ""


class BackendMeta(ABCMeta):
    """Class of back ends: adds UserMethods to the bases of those that derive from BaseBackend."""

    def __new__(
        metaclass, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any
    ) -> BackendMeta:
        derived = any(isinstance(base, BackendMeta) for base in bases)
        if derived and not any(issubclass(base, UserMethods) for base in bases):
            bases = (*bases, UserMethods)
        return super().__new__(metaclass, name, bases, namespace, **options)

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            """`BaseBackend.prepare_model(self, model)`, as an override of it may call."""
            if name not in vars(UserMethods) or name.startswith("__"):
                raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}", name=name, obj=cls)
            return getattr(UserMethods, name)


class _Method:
    """Descriptor that imports a function on first use and binds it to the back end."""

    def __init__(self, module: str, name: str):
        self._module, self._name = module, name

    def __get__(self, backend: BaseBackend | None, owner: type) -> Callable[..., Any]:
        function = _import_function(self._module, self._name)
        return function if backend is None else MethodType(function, backend)


def _property(module: str, name: str) -> property:
    return property(lambda backend: _import_function(module, name)(backend))


def _import_function(module: str, name: str) -> Callable[..., Any]:
    """The function without `overridable`, which would call the override that called it by `super()`."""
    function: Callable[..., Any] = inspect.unwrap(getattr(import_module(module), name))
    return function


for _module, _names in FUNCTIONS.items():
    for _name in _names:
        setattr(UserMethods, _name, (_property if _name in PROPERTIES else _Method)(_module, _name))


def overridable(function: Function) -> Function:
    """Call the back end's own method or property of the function's name instead, if it defines one."""
    name = function.__name__

    @wraps(function)
    def call(backend: BaseBackend, *arguments: Any, **options: Any) -> Any:
        default = vars(UserMethods)[name]
        if inspect.getattr_static(backend, name, default) is default:
            return function(backend, *arguments, **options)
        own = getattr(backend, name)
        return own if name in PROPERTIES else own(*arguments, **options)

    return cast(Function, call)


def record_report(backend: BaseBackend, report: object) -> None:
    """Set `backend.report`."""
    cast(UserMethods, backend).report = report


def record_fallback(backend: BaseBackend, requested: str, reason: str) -> None:
    """Set `backend.fallback_from` and `backend.fallback_reason`."""
    methods = cast(UserMethods, backend)
    methods.fallback_from, methods.fallback_reason = requested, reason
