"""The kernels "auto": for each operation, dtype and class of shapes, the fastest measured implementation."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cluster.errors import UserError
from workers import kernels as registry
from workers.devices.backends.device_facts import kind
from workers.devices.backends.precision import name_of
from workers.kernels import sdpa
from workers.kernels.base import KernelBackend
from workers.kernels.calls import Call
from workers.kernels.dispatch.classes import shape_class
from workers.kernels.dispatch.tuner import BASE, Situation, fastest_choices, software_of

if TYPE_CHECKING:
    from workers.devices.backends.base import BaseBackend

Optional = Tensor | None


class Fastest(KernelBackend):
    """Dispatches to the fastest implementations. The choice is read once, at creation.

    With torch.distributed, all ranks on one kind of device use the first rank's choice: different roundings would make
    the ranks diverge.
    """

    name = "auto"

    def __init__(self, device: Any = None):
        self._base = registry.create(BASE, device)
        self._implementations: dict[str, KernelBackend] = {BASE: self._base}
        super().__init__(self._base.device)
        self.kind = kind_of(self.device)
        self._choices = agreed_choices("kernels", self.kind, fastest_choices(self.kind, self._software()))

    @classmethod
    def unavailable_reason(cls) -> str:
        return ""

    def device_info(self) -> dict[str, Any]:
        return self._base.device_info() | {"kernels": sorted(self._implementations), "chosen": len(self._choices)}

    def choices(self) -> dict[Situation, str]:
        """Return the choices that are faster than torch here; torch computes everything else."""
        return dict(self._choices)

    def synchronize(self) -> None:
        for one in self._implementations.values():
            one.synchronize()

    def close(self) -> None:
        for one in self._implementations.values():
            one.close()

    def select(self, operation: str, first: Tensor, second: Optional = None, gradient: bool = False) -> KernelBackend:
        """Return the implementation for an operation and shapes of its arrays; leading dimensions may be merged."""
        return self._select(operation, first.shape, () if second is None else second.shape, first.dtype, gradient)

    def attention_variant(self, q: Tensor, k: Tensor, dtype: torch.dtype, gradient: bool) -> str | None:
        """A gradient by torch's function needs its forward, too: then the gradient's choice is used for both."""
        chosen = [self._select("attention", q.shape, k.shape, dtype, with_gradient) for with_gradient in (False, True)]
        variants = [one.attention_variant(q, k, dtype, gradient) for one in (chosen if gradient else chosen[:1])]
        return None if None in variants else variants[-1]

    def _select(
        self, operation: str, first: Sequence[int], second: Sequence[int], dtype: torch.dtype, gradient: bool
    ) -> KernelBackend:
        shapes = shape_class(operation, first, second)
        name = self._choices.get(Situation(self.kind, operation, name_of(dtype), shapes, gradient), BASE)
        return self._implementations.get(name, self._base)

    def _device(self, device: Any) -> torch.device:
        return torch.device(device)

    def _software(self) -> dict[str, str]:
        self._implementations |= candidates(self.device)
        return {name: software_of(one) for name, one in self._implementations.items() if name != BASE}

    # Hooks call the public method of the chosen implementation, whose checks take some microseconds again.

    def _matmul(self, a_BMK: Tensor, b_BKN: Tensor, out_BMN: Tensor, a_transposed: bool, b_transposed: bool) -> None:
        a, b = a_BMK.mT if a_transposed else a_BMK, b_BKN.mT if b_transposed else b_BKN
        self.select("matmul", a, b).matmul(a, b, out=out_BMN)

    def _matmul_vec(self, a_BMK: Tensor, x_BK: Tensor, out_BM: Tensor) -> None:
        self.select("matmul_vec", a_BMK, x_BK).matmul_vec(a_BMK, x_BK, out=out_BM)

    def _weighted_sum_rows(self, weights_BT: Tensor, rows_BTD: Tensor, out_BD: Tensor) -> None:
        self.select("weighted_sum_rows", weights_BT, rows_BTD).weighted_sum_rows(weights_BT, rows_BTD, out=out_BD)

    def _rmsnorm(
        self, x_RC: Tensor, weight_C: Optional, out_RC: Tensor, eps: float, offset: float, round_before_weight: bool
    ) -> None:
        self.select("rmsnorm", x_RC).rmsnorm(
            x_RC, weight_C, eps, offset=offset, round_before_weight=round_before_weight, out=out_RC
        )

    def _layernorm(self, x_RC: Tensor, weight_C: Optional, bias_C: Optional, out_RC: Tensor, eps: float) -> None:
        self.select("layernorm", x_RC).layernorm(x_RC, weight_C, bias_C, eps, out=out_RC)

    def _softmax(self, x_RC: Tensor, out_RC: Tensor) -> None:
        self.select("softmax", x_RC).softmax(x_RC, out=out_RC)

    def _silu(self, x_RC: Tensor, out_RC: Tensor) -> None:
        self.select("silu", x_RC).silu(x_RC, out=out_RC)

    def _swiglu(self, gate_RC: Tensor, up_RC: Tensor, out_RC: Tensor) -> None:
        self.select("swiglu", gate_RC).swiglu(gate_RC, up_RC, out=out_RC)

    def _rope(self, x_BTD: Tensor, cos_SP: Tensor, sin_SP: Tensor, out_BTD: Tensor, position: int, pairs: bool) -> None:
        layout = "pairs" if pairs else "halves"
        self.select("apply_rope", x_BTD).apply_rope(
            x_BTD, cos_SP, sin_SP, position=position, layout=layout, out=out_BTD
        )

    def _scores(self, q_BHTD: Tensor, k_BGSD: Tensor, out_BHTS: Tensor, scale: float) -> None:
        chosen = self.select("compute_attention_scores", q_BHTD, k_BGSD)
        chosen.compute_attention_scores(q_BHTD, k_BGSD, scale=scale, out=out_BHTS)

    def _attention(
        self,
        q_BHTD: Tensor,
        k_BGSD: Tensor,
        v_BGSE: Tensor,
        mask_BHTS: Optional,
        out_BHTE: Tensor,
        lse_BHT: Optional,
        scale: float,
        causal: bool,
    ) -> None:
        one = self.select("attention", q_BHTD, k_BGSD)
        options: dict[str, Any] = {"scale": scale, "mask": mask_BHTS, "causal": causal}
        if lse_BHT is None:
            one.attention(q_BHTD, k_BGSD, v_BGSE, **options, out=out_BHTE)
        else:
            lse_BHT.copy_(one.attention(q_BHTD, k_BGSD, v_BGSE, **options, return_lse=True, out=out_BHTE)[1])

    def _compute(self, call: Call, hook: Any, *arguments: Any) -> Any:
        """Call the same hook of the chosen implementation. Arguments are the gradient, then the operation's arrays."""
        operation = hook.__name__.removeprefix("_").removesuffix("_backward")
        second = arguments[2] if operation == "attention" else None
        chosen = self.select(operation, arguments[1], second, gradient=True)
        return super()._compute(call, getattr(chosen, hook.__name__), *arguments)


def candidates(device: torch.device) -> dict[str, KernelBackend]:
    """Create every implementation that is not interpreted on the device: variants of torch's, but not torch itself."""
    implementations = {}
    for name in (*registry.names(), *torch_variants(device)):
        if name == BASE or registry.unavailable_reason(name):
            continue
        try:
            implementation = registry.create(name, device)
        except UserError:
            continue
        if not implementation.interpreted and implementation.takes(device):
            implementations[name] = implementation
    return implementations


def torch_variants(device: torch.device) -> tuple[str, ...]:
    """Return the names of torch's kernels for attention on the device, as in `torch:flash`."""
    return tuple(f"{BASE}:{name}" for name in sdpa.usable(device))


def kind_of(device: torch.device) -> str:
    """Return the fleet's name for the kind of device, e.g. `cpu` or `nvidia:H100-80GB`."""
    return kind(backend_of(device))


def backend_of(device: torch.device) -> "BaseBackend":
    """Create the back end for a torch.device."""
    from workers.devices import backends
    from workers.devices.selection import factory

    for detected in factory.detected_devices():
        if detected.device_type.partition(":")[0] == device.type:
            return backends.create(detected.backend, device.index or 0)
    return backends.create("cpu")


def agreed_choices(subject: str, kind: str, own_choices: dict[Situation, str]) -> dict[Situation, str]:
    """Return the choices for this kind that the first of several ranks has published under `subject`, else our own."""
    proposal = json.dumps(
        [[s.operation, s.dtype, s.shapes, s.gradient, s.compiled, name] for s, name in own_choices.items()]
    )
    agreed = json.loads(agreed_text(f"{subject}/{kind}", proposal))
    return {Situation(kind, *parts): name for *parts, name in agreed}


def agreed_text(key: str, own_text: str) -> str:
    """Return the text that the first of several ranks has published under `key`, else our own."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return own_text
    store = dist.distributed_c10d._get_default_store()
    agreed = store.compare_set(f"polyfleet/{key}", "", own_text)
    return str(agreed.decode() if isinstance(agreed, bytes) else agreed)
