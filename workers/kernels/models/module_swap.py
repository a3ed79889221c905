"""A module with kernels is of a class of its own, made of its former class: parameters, names and ties are untouched,
and taking the kernels out gives the former class back. No other module changes, whatever their common class.
"""

from typing import Any

import torch
from torch import Tensor, nn

from workers.kernels import operators
from workers.kernels.models.attention_patch import Key, rebound
from workers.kernels.models.module_forms import Form

FORM, KERNELS, DEVICE = "_kernel_form", "_kernel_name", "_kernel_device"
TORCHS = (nn.LayerNorm, nn.RMSNorm, nn.SiLU)
"""Whose dtypes under autocast our operators have too."""


def rebind(module: nn.Module, key: Key) -> None:
    """Let the module's forward see functions that call kernels: `key` names operations, and the kernels for each."""
    module.__class__ = _class_of(type(module), key)


def swap(module: nn.Module, form: Form, kernels: str, device: torch.device) -> None:
    """Let `kernels` compute what `form` says, for tensors on `device`. Raises TypeError where Python does not let a
    class be exchanged.
    """
    module.__class__ = _class_of(type(module), form.operation)
    vars(module).update({FORM: form, KERNELS: kernels, DEVICE: device})


def swapped(module: nn.Module) -> bool:
    return isinstance(module, _Kernels | _Rebound)


def take_out(module: nn.Module) -> bool:
    """Whether there was something to take out."""
    if not swapped(module):
        return False
    module.__class__ = type(module).__bases__[1]
    for name in (FORM, KERNELS, DEVICE):
        vars(module).pop(name, None)
    return True


class _Kernels(nn.Module):
    """Whatever was not tried (other dtypes, devices, arguments, autocast) is computed as before."""

    def forward(self, *given: Any, **named: Any) -> Any:
        if named or len(given) != 1 or not _is_known(self, given[0]):
            return super().forward(*given, **named)
        return self._compute(given[0], getattr(self, FORM), getattr(self, KERNELS))

    def _compute(self, x: Tensor, form: Form, kernels: str) -> Tensor:
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Classes that are made here have no place in a module: pickle and deepcopy get what they are made of."""
        return _rebuilt, (type(self).__bases__[1], getattr(self, FORM).operation), self.__dict__.copy()

    def extra_repr(self) -> str:
        told = super().extra_repr()
        return f"{told}{', ' if told else ''}kernels={getattr(self, KERNELS)!r}"


class _RMSNorm(_Kernels):
    def _compute(self, x: Tensor, form: Form, kernels: str) -> Tensor:
        return operators.rmsnorm(x, _named(self, form.names[0]), **form.options, kernels=kernels)


class _LayerNorm(_Kernels):
    def _compute(self, x: Tensor, form: Form, kernels: str) -> Tensor:
        weight, bias = (_named(self, name) for name in form.names)
        return operators.layernorm(x, weight, bias, **form.options, kernels=kernels)


class _SiLU(_Kernels):
    def _compute(self, x: Tensor, form: Form, kernels: str) -> Tensor:
        return operators.silu(x, kernels=kernels)


class _SwiGLU(_Kernels):
    def _compute(self, x: Tensor, form: Form, kernels: str) -> Tensor:
        gate, up, down = (getattr(self, name) for name in form.names)
        answer: Tensor = down(operators.swiglu(gate(x), up(x), kernels=kernels))
        return answer


class _Rebound(nn.Module):
    """Its forward is made by attention_patch.py; `_key` tells of which functions."""

    _key: Key = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (type(self).__bases__[1], self._key), self.__dict__.copy()

    def extra_repr(self) -> str:
        told = ", ".join([super().extra_repr(), *(f"{operation}={kernels!r}" for operation, kernels in self._key)])
        return told.removeprefix(", ")


_MIXINS = {"rmsnorm": _RMSNorm, "layernorm": _LayerNorm, "silu": _SiLU, "swiglu": _SwiGLU}


_MADE: dict[tuple[type, str | Key], type[nn.Module]] = {}


def _class_of(base: type[nn.Module], what: str | Key) -> type[nn.Module]:
    """One for all modules of a class, as torch.compile's guards want it: of an operation, or a forward that sees
    others.
    """
    if (base, what) not in _MADE:
        about: dict[str, Any] = {"__module__": base.__module__, "__doc__": base.__doc__}
        mixin: type[nn.Module] = _Rebound
        if isinstance(what, str):
            mixin = _MIXINS[what]
        else:
            about |= {"forward": rebound(base, what), "_key": what}
        _MADE[base, what] = type(f"Kernel{base.__name__}", (mixin, base), about)
    return _MADE[base, what]


def _rebuilt(base: type[nn.Module], what: str | Key) -> nn.Module:
    cls = _class_of(base, what)
    made: nn.Module = cls.__new__(cls)
    return made


def _named(module: nn.Module, name: str) -> Tensor | None:
    return getattr(module, name) if name else None


def _is_known(module: nn.Module, x: Any) -> bool:
    """Whether the form was tried for such an argument."""
    form: Form = getattr(module, FORM)
    if not isinstance(x, Tensor) or x.dtype not in form.dtypes or x.device != getattr(module, DEVICE):
        return False
    if form.operation == "swiglu":
        return True
    if torch.is_autocast_enabled(x.device.type) and not isinstance(module, TORCHS):
        return False
    weights = (_named(module, name) for name in form.names)
    return all(weight is None or weight.dtype == x.dtype for weight in weights)
