"""Change the class of a single module to a subclass that calls kernels.

Parameters, names and ties do not change, and removing the kernels restores the original class. Other modules of the
same class are not affected.
"""

from typing import Any

import torch
from torch import Tensor, nn

from workers.kernels.dispatch import operators
from workers.kernels.models.attention_patch import Key, rebind_forward
from workers.kernels.models.module_forms import Form

FORM, KERNELS, DEVICE = "_kernel_form", "_kernel_name", "_kernel_device"
TORCH_CLASSES = (nn.LayerNorm, nn.RMSNorm, nn.SiLU)
"""Classes whose dtypes under autocast are the same as our operators'."""


def rebind(module: nn.Module, key: Key) -> None:
    """Let the module's forward use functions that call kernels. `key`: (operation, name of its kernels) pairs."""
    module.__class__ = _class_of(type(module), key)


def swap(module: nn.Module, form: Form, kernels: str, device: torch.device) -> None:
    """Let `kernels` compute the operation of `form` for tensors on `device`. Raises TypeError if Python cannot change
    the module's class.
    """
    module.__class__ = _class_of(type(module), form.operation)
    vars(module).update({FORM: form, KERNELS: kernels, DEVICE: device})


def has_kernels(module: nn.Module) -> bool:
    return isinstance(module, _Kernels | _Rebound)


def remove_kernels(module: nn.Module) -> bool:
    """Remove the kernels of a module. Return whether it had any."""
    if not has_kernels(module):
        return False
    module.__class__ = type(module).__bases__[1]
    for name in (FORM, KERNELS, DEVICE):
        vars(module).pop(name, None)
    return True


class _Kernels(nn.Module):
    """Mixin of modules with kernels. Untested cases (other dtypes, devices, arguments, autocast) run as before."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or not _is_tested_for(self, args[0]):
            return super().forward(*args, **kwargs)
        return self._compute(args[0], getattr(self, FORM), getattr(self, KERNELS))

    def _compute(self, x: Tensor, form: Form, kernels: str) -> Tensor:
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let pickle and deepcopy rebuild the class, because classes made here cannot be imported by name."""
        return _rebuild, (type(self).__bases__[1], getattr(self, FORM).operation), self.__dict__.copy()

    def extra_repr(self) -> str:
        text = super().extra_repr()
        return f"{text}{', ' if text else ''}kernels={getattr(self, KERNELS)!r}"


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
        output: Tensor = down(operators.swiglu(gate(x), up(x), kernels=kernels))
        return output


class _Rebound(nn.Module):
    """Mixin of modules whose forward attention_patch.py made. `_key` lists the replaced functions."""

    _key: Key = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (type(self).__bases__[1], self._key), self.__dict__.copy()

    def extra_repr(self) -> str:
        text = ", ".join([super().extra_repr(), *(f"{operation}={kernels!r}" for operation, kernels in self._key)])
        return text.removeprefix(", ")


_MIXINS = {"rmsnorm": _RMSNorm, "layernorm": _LayerNorm, "silu": _SiLU, "swiglu": _SwiGLU}


_classes: dict[tuple[type, str | Key], type[nn.Module]] = {}


def _class_of(base: type[nn.Module], what: str | Key) -> type[nn.Module]:
    """Return the subclass of `base` for an operation or a key, one for all modules, as torch.compile's guards need."""
    if (base, what) not in _classes:
        about: dict[str, Any] = {"__module__": base.__module__, "__doc__": base.__doc__}
        mixin: type[nn.Module] = _Rebound
        if isinstance(what, str):
            mixin = _MIXINS[what]
        else:
            about |= {"forward": rebind_forward(base, what), "_key": what}
        _classes[base, what] = type(f"Kernel{base.__name__}", (mixin, base), about)
    return _classes[base, what]


def _rebuild(base: type[nn.Module], what: str | Key) -> nn.Module:
    cls = _class_of(base, what)
    module: nn.Module = cls.__new__(cls)
    return module


def _named(module: nn.Module, name: str) -> Tensor | None:
    return getattr(module, name) if name else None


def _is_tested_for(module: nn.Module, x: Any) -> bool:
    """Return whether the form was tested for such an argument."""
    form: Form = getattr(module, FORM)
    if not isinstance(x, Tensor) or x.dtype not in form.dtypes or x.device != getattr(module, DEVICE):
        return False
    if form.operation == "swiglu":
        return True
    if torch.is_autocast_enabled(x.device.type) and not isinstance(module, TORCH_CLASSES):
        return False
    weights = (_named(module, name) for name in form.names)
    return all(weight is None or weight.dtype == x.dtype for weight in weights)
