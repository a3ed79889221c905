"""Define the operators in torch.library: schema, kernel, shapes of results, gradients and autocast.

They use torch.library.Library, whose calls take 5 µs, while those of `custom_op` take 17 µs (torch 2.13, CPU).
"""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cluster.errors import UserError
from workers.kernels.dispatch import fakes, gradients_of

NAMESPACE = "polyfleet"
SCHEMAS = {
    "rmsnorm": "(Tensor x, Tensor? weight, float eps, float offset, bool round_before_weight, str kernels) -> Tensor",
    "rmsnorm_backward": "(Tensor grad, Tensor x, Tensor? weight, float eps, float offset, str kernels)"
    " -> (Tensor, Tensor)",
    "layernorm": "(Tensor x, Tensor? weight, Tensor? bias, float eps, str kernels) -> Tensor",
    "layernorm_backward": "(Tensor grad, Tensor x, Tensor? weight, Tensor? bias, float eps, str kernels)"
    " -> (Tensor, Tensor, Tensor)",
    "softmax": "(Tensor x, str kernels) -> Tensor",
    "softmax_backward": "(Tensor grad, Tensor y, str kernels) -> Tensor",
    "silu": "(Tensor x, str kernels) -> Tensor",
    "silu_backward": "(Tensor grad, Tensor x, str kernels) -> Tensor",
    "swiglu": "(Tensor gate, Tensor up, str kernels) -> Tensor",
    "swiglu_backward": "(Tensor grad, Tensor gate, Tensor up, str kernels) -> (Tensor, Tensor)",
    "apply_rope": "(Tensor x, Tensor cos, Tensor sin, int position, str layout, str kernels) -> Tensor",
    "apply_rope_backward": "(Tensor grad, Tensor cos, Tensor sin, int position, str layout, str kernels) -> Tensor",
    "matmul": "(Tensor a, Tensor b, str kernels) -> Tensor",
    "matmul_backward": "(Tensor grad, Tensor a, Tensor b, str kernels) -> (Tensor, Tensor)",
    "attention": "(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal, bool with_lse, str kernels)"
    " -> (Tensor, Tensor)",
    "attention_backward": "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? mask,"
    " float scale, bool causal, str kernels) -> (Tensor, Tensor, Tensor)",
}
IN_FLOAT32 = ("rmsnorm", "layernorm", "softmax")
IN_LOWER = ("matmul", "attention")
AUTOCAST: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cuda": (IN_FLOAT32, IN_LOWER),
    "xpu": (IN_FLOAT32, IN_LOWER),
    "cpu": ((), IN_LOWER),
}
"""Operators that autocast computes in float32, and in its own dtype, by device: as torch's functions of these names.
Source: docs.pytorch.org/docs/stable/amp.html, "Autocast Op Reference".
"""


@cache
def define_operators() -> Any:
    """Define the operators once per process. Return them by name, without torch's overload resolution per call."""
    library = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
    _LIBRARIES.append(library)
    for name, schema in SCHEMAS.items():
        library.define(f"{name}{schema}")  # type: ignore[no-untyped-call]
        library.impl(name, _make_kernel(name), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"{NAMESPACE}::{name}", getattr(fakes, name), lib=library)
        backward, setup = gradients_of.TABLE.get(name, (_refuse_second_gradient(name), None))
        torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup, lib=library)
    for device in AUTOCAST:
        for name in (*IN_FLOAT32, *IN_LOWER):
            _autocast(library, device, name)
    return SimpleNamespace(**{name: getattr(torch.ops.polyfleet, name).default for name in SCHEMAS})


_LIBRARIES: list[torch.library.Library] = []


def needs_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def can_call_directly(first: Tensor, *others: Tensor | None) -> bool:
    """Return whether kernels can be called without torch's dispatcher, which takes 15 µs: tracing, autocast, function
    transforms and gradients are all inactive.
    """
    if not is_plain(first) or needs_gradients(first, *others):
        return False
    return not torch.is_autocast_enabled(first.device.type)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a call with this tensor computes at once: it is not traced, mapped or recorded."""
    return not (
        torch.compiler.is_compiling()
        or type(tensor) not in TENSOR_TYPES
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


TENSOR_TYPES = (Tensor, torch.nn.Parameter)


def kernels_of(name: str, device: torch.device) -> Any:
    """Return the kernels for a device, created once per process. Raises as kernel_choice.init_kernels."""
    key = name, device
    kernels = _KERNELS.get(key)
    if kernels is None:
        from workers.kernels.dispatch.kernel_choice import init_kernels

        kernels = _KERNELS[key] = init_kernels(name, device=device)
    return kernels


_KERNELS: dict[tuple[str, torch.device], Any] = {}


def _make_kernel(name: str) -> Callable[..., Any]:
    compute = getattr(_Compute, name)

    def kernel(*arguments: Any) -> Any:
        first = arguments[0]
        with torch.no_grad():
            return compute(kernels_of(arguments[-1], first.device), *arguments[:-1])

    return kernel


class _Compute:
    """Adapters from operators to methods. Results match the schema: new, contiguous, none missing."""

    @staticmethod
    def rmsnorm(k: Any, x: Tensor, weight: Tensor | None, eps: float, offset: float, rounded: bool) -> Any:
        return k.rmsnorm(x, weight, eps, offset=offset, round_before_weight=rounded)

    @staticmethod
    def rmsnorm_backward(k: Any, grad: Tensor, x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Any:
        return _without_missing(x, k.rmsnorm_backward(grad, x, weight, eps, offset=offset))

    @staticmethod
    def layernorm(k: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
        return k.layernorm(x, weight, bias, eps)

    @staticmethod
    def layernorm_backward(
        k: Any, grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Any:
        return _without_missing(x, k.layernorm_backward(grad, x, weight, bias, eps))

    @staticmethod
    def softmax(k: Any, x: Tensor) -> Any:
        return k.softmax(x)

    @staticmethod
    def softmax_backward(k: Any, grad: Tensor, y: Tensor) -> Any:
        return k.softmax_backward(grad, y)

    @staticmethod
    def silu(k: Any, x: Tensor) -> Any:
        return k.silu(x)

    @staticmethod
    def silu_backward(k: Any, grad: Tensor, x: Tensor) -> Any:
        return k.silu_backward(grad, x)

    @staticmethod
    def swiglu(k: Any, gate: Tensor, up: Tensor) -> Any:
        return k.swiglu(gate, up)

    @staticmethod
    def swiglu_backward(k: Any, grad: Tensor, gate: Tensor, up: Tensor) -> Any:
        return k.swiglu_backward(grad, gate, up)

    @staticmethod
    def apply_rope(k: Any, x: Tensor, cos: Tensor, sin: Tensor, position: int, layout: str) -> Any:
        return k.apply_rope(x, cos, sin, position=position, layout=layout)

    @staticmethod
    def apply_rope_backward(k: Any, grad: Tensor, cos: Tensor, sin: Tensor, position: int, layout: str) -> Any:
        return k.apply_rope_backward(grad, cos, sin, position=position, layout=layout)

    @staticmethod
    def matmul(k: Any, a: Tensor, b: Tensor) -> Any:
        return k.matmul(a, b)

    @staticmethod
    def matmul_backward(k: Any, grad: Tensor, a: Tensor, b: Tensor) -> Any:
        """Sum the gradients over the leading dimensions that the forward broadcast."""
        grads = k.matmul_backward(grad, a, b)
        return tuple(one.sum_to_size(of.shape).contiguous() for one, of in zip(grads, (a, b), strict=True))

    @staticmethod
    def attention(
        k: Any, q: Tensor, key: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool, with_lse: bool
    ) -> Any:
        options: dict[str, Any] = {"scale": scale, "mask": mask, "causal": causal}
        if not with_lse:
            return k.attention(q, key, v, **options).contiguous(), q.new_empty(0, dtype=torch.float32)
        out, lse = k.attention(q, key, v, **options, return_lse=True)
        return out.contiguous(), lse

    @staticmethod
    def attention_backward(
        k: Any,
        grad: Tensor,
        q: Tensor,
        key: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None,
        scale: float,
        causal: bool,
    ) -> Any:
        return k.attention_backward(grad, q, key, v, out, lse, scale=scale, mask=mask, causal=causal)


def _without_missing(like: Tensor, grads: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """Replace missing gradients by empty tensors, since an operator must return every result."""
    return tuple(like.new_empty(0) if one is None else one for one in grads)


def _refuse_second_gradient(name: str) -> Callable[..., Any]:
    operation = name.removesuffix("_backward")
    torch_name = "torch:math" if operation == "attention" else "torch"  # its other kernels have none, either

    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise UserError(
            f"the gradient of {operation}'s gradient is not computed",
            f"use kernels={torch_name!r} for {operation} here",
        )

    return backward


def _autocast(library: torch.library.Library, device: str, name: str) -> None:
    """Register like torch.library.register_autocast, whose dtype is fixed, but use autocast's current dtype."""
    in_float32, in_lower = AUTOCAST[device]
    if name not in (*in_float32, *in_lower):
        return
    key = f"Autocast{torch._C._dispatch_key_for_device(device)}"
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    operator = getattr(torch.ops.polyfleet, name).default

    def kernel(*arguments: Any) -> Any:
        dtype = torch.float32 if name in in_float32 else torch.get_autocast_dtype(device)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return operator(*(_cast(one, dtype, device) for one in arguments))

    library.impl(name, kernel, key)  # type: ignore[no-untyped-call]


def _cast(value: Any, dtype: torch.dtype, device: str) -> Any:
    """Convert floating-point tensors on that device, except float64, which autocast does not convert either."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.device.type == device:
        return value if value.dtype == torch.float64 else value.to(dtype)
    return value
