"""C++ kernels for the CPU, built by this machine's compiler on first use: one memory pass, rows split over threads.

Sums are accumulated in float32 in at least 32 parts, and results are bit-identical for any number of threads. A call
uses as many threads as torch may use at that time. Sources: workers/kernels/sources/cpu_*.cpp.
"""

import platform
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workers import native
from workers.devices.libraries.library import EffectCheck
from workers.errors import NativeUnavailable
from workers.kernels.drivers import cpu_proofs
from workers.kernels.drivers.cpu_direct import FastPath
from workers.kernels.drivers.cpu_library import DTYPES, MASK_DTYPES, Compiled, compiled, flags
from workers.native.compiler import cpu_features, find_compiler

FEATURES = ("sse2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512vl", "asimd", "asimdhp", "sve")
"""CPU features that change the code which the compiler generates from these sources."""

MIN_QUERY_TOKENS = 16
"""Torch computes attention in float32 from this number of query tokens on."""


class Kernels(FastPath):
    """Kernels in C++. `use_simd` False builds the same sources without vector instructions; `use_parallel` False runs
    every call on the caller's thread. `prove` checks that both options took effect.

    If both are true, torch computes products with a matrix in float32, and in bfloat16 if the CPU has instructions for
    it, and some other calls for which it was measured to be faster (cpu_direct.py): only their bits may depend on the
    number of threads.
    """

    name = "cpu"
    own_gradients = frozenset({"rmsnorm", "layernorm", "softmax", "silu", "swiglu"})

    def __init__(self, device: Any = None, *, use_simd: bool = True, use_parallel: bool = True):
        super().__init__(device)
        self.use_simd, self.use_parallel = bool(use_simd), bool(use_parallel)

    @classmethod
    def unavailable_reason(cls) -> str:
        """Check that the compiler can build a small function. The kernels themselves are built at the first call."""
        return native.unavailable_reason()

    def device_info(self) -> dict[str, Any]:
        """Describe the CPU and the build. `lanes`: float32 values per vector."""
        try:
            compiler = find_compiler()
            command, version = " ".join(compiler.command), compiler.version.splitlines()[0]
        except (NativeUnavailable, IndexError):
            command, version = "", ""
        return {
            "device": "cpu",
            "device_name": _processor(),
            "driver": "C++ through ctypes",
            "version": "1",
            "compiler": version or command,
            "flags": " ".join((*native.FLAGS, *flags(self.use_simd))),
            "cpu_features": [name for name in FEATURES if name in cpu_features().split()],
            "lanes": self._library.lanes(),
            "threads": self._threads(),
        }

    def prove(self) -> tuple[EffectCheck, EffectCheck]:
        """Check that `use_simd` and `use_parallel` took effect."""
        threads = self._threads()
        return cpu_proofs.simd(self.use_simd), cpu_proofs.parallel(self.use_parallel, self._library, threads)

    @cached_property
    def _library(self) -> Compiled:
        return compiled(self.use_simd)

    def _threads(self) -> int:
        return torch.get_num_threads() if self.use_parallel else 1

    # Products

    def _matmul(self, a_BMK: Tensor, b_BKN: Tensor, out_BMN: Tensor, a_transposed: bool, b_transposed: bool) -> None:
        if self.multiplies_by_torch(out_BMN.dtype, out_BMN.shape[1], b_transposed):
            a, b = (
                one.mT if is_transposed else one
                for one, is_transposed in ((a_BMK, a_transposed), (b_BKN, b_transposed))
            )
            torch.bmm(a, b, out=out_BMN)
            return
        self._product(a_BMK, b_BKN, out_BMN, a_BMK.shape[1 if a_transposed else 2], a_transposed, b_transposed, 1.0)

    @property
    def leaves_to_torch(self) -> bool:
        """The options apply only to our own code."""
        return self.use_simd and self.use_parallel

    def multiplies_by_torch(self, dtype: torch.dtype, rows: int, b_transposed: bool) -> bool:
        """torch's BLAS is faster in float32, and in bfloat16 with CPU support.

        It is not faster in float16, nor for one row of bfloat16 and a transposed matrix on every CPU.
        """
        if not self.leaves_to_torch:
            return False
        if dtype == torch.float32:
            return True
        return dtype == torch.bfloat16 and _multiplies_bfloat16() and not (b_transposed and rows == 1)

    def attends_by_torch(self, dtype: torch.dtype, query_tokens: int, causal: bool) -> bool:
        """Measured on AMD without tiles, where ours is 1.2 to 1.4 times as fast in float32 with a causal mask and 1.1
        to 6 times in bfloat16, and on Intel with tiles, where it takes 1.2 and 2 to 5 times as long. For few tokens in
        float32 ours is 1.4 to 1.7 times as fast on both.
        """
        if not self.leaves_to_torch:
            return False
        if dtype == torch.bfloat16:
            return _has_tiles()
        return dtype == torch.float32 and query_tokens >= MIN_QUERY_TOKENS and (not causal or _has_tiles())

    def _product(
        self, a: Tensor, b: Tensor, out_BMN: Tensor, depth: int, a_transposed: bool, b_transposed: bool, scale: float
    ) -> None:
        batch, rows, columns = out_BMN.shape
        sizes = batch, rows, depth, columns
        arrays = _address(a), _address(b), _address(out_BMN)
        self._library.matmul(DTYPES[out_BMN.dtype], *arrays, *sizes, a_transposed, b_transposed, scale, self._threads())

    def _matmul_vec(self, a_BMK: Tensor, x_BK: Tensor, out_BM: Tensor) -> None:
        self._library.matmul_vec(
            DTYPES[out_BM.dtype], _address(a_BMK), _address(x_BK), _address(out_BM), *a_BMK.shape, self._threads()
        )

    def _weighted_sum_rows(self, weights_BT: Tensor, rows_BTD: Tensor, out_BD: Tensor) -> None:
        self._library.weighted_sum_rows(
            DTYPES[out_BD.dtype],
            _address(weights_BT),
            _address(rows_BTD),
            _address(out_BD),
            *rows_BTD.shape,
            self._threads(),
        )

    # Rows

    def _rmsnorm(
        self,
        x_RC: Tensor,
        weight_C: Tensor | None,
        out_RC: Tensor,
        eps: float,
        offset: float,
        round_before_weight: bool,
    ) -> None:
        dtypes = DTYPES[x_RC.dtype], _dtype(weight_C, x_RC)
        arrays = _address(x_RC), _address(weight_C), _address(out_RC)
        self._library.rmsnorm(*dtypes, *arrays, *_size(x_RC), eps, offset, round_before_weight, self._threads())

    def _layernorm(
        self, x_RC: Tensor, weight_C: Tensor | None, bias_C: Tensor | None, out_RC: Tensor, eps: float
    ) -> None:
        weight_C, bias_C = _same_dtype(weight_C, bias_C)
        dtypes = DTYPES[x_RC.dtype], _dtype(bias_C if weight_C is None else weight_C, x_RC)
        arrays = _address(x_RC), _address(weight_C), _address(bias_C), _address(out_RC)
        self._library.layernorm(*dtypes, *arrays, *_size(x_RC), eps, self._threads())

    def _softmax(self, x_RC: Tensor, out_RC: Tensor) -> None:
        self._library.softmax(DTYPES[x_RC.dtype], _address(x_RC), _address(out_RC), *_size(x_RC), self._threads())

    def _silu(self, x_RC: Tensor, out_RC: Tensor) -> None:
        self._library.silu(DTYPES[x_RC.dtype], _address(x_RC), _address(out_RC), x_RC.numel(), self._threads())

    def _swiglu(self, gate_RC: Tensor, up_RC: Tensor, out_RC: Tensor) -> None:
        arrays = _address(gate_RC), _address(up_RC), _address(out_RC)
        self._library.swiglu(DTYPES[gate_RC.dtype], *arrays, gate_RC.numel(), self._threads())

    def _rope(self, x_BTD: Tensor, cos_SP: Tensor, sin_SP: Tensor, out_BTD: Tensor, position: int, pairs: bool) -> None:
        dtypes = DTYPES[x_BTD.dtype], DTYPES[cos_SP.dtype]
        arrays = _address(x_BTD), _address(cos_SP), _address(sin_SP), _address(out_BTD)
        self._library.rope(*dtypes, *arrays, *x_BTD.shape, cos_SP.shape[1], position, pairs, self._threads())

    # Attention

    def _scores(self, q_BHTD: Tensor, k_BGSD: Tensor, out_BHTS: Tensor, scale: float) -> None:
        batch, groups, many, width = k_BGSD.shape
        queries, keys = q_BHTD.view(batch * groups, -1, width), k_BGSD.view(batch * groups, many, width)
        scores = out_BHTS.view(batch * groups, -1, many)
        if self.multiplies_by_torch(scores.dtype, scores.shape[1], True):
            torch.baddbmm(scores, queries, keys.mT, beta=0, alpha=scale, out=scores)
            return
        self._product(queries, keys, scores, width, False, True, scale)

    def _attention(
        self,
        q_BHTD: Tensor,
        k_BGSD: Tensor,
        v_BGSE: Tensor,
        mask_BHTS: Tensor | None,
        out_BHTE: Tensor,
        lse_BHT: Tensor | None,
        scale: float,
        causal: bool,
    ) -> None:
        batch, heads, tokens, width = q_BHTD.shape
        groups, key_tokens, value_width = v_BGSE.shape[1:]
        self._library.attention(
            *(
                DTYPES[q_BHTD.dtype],
                _address(q_BHTD),
                _address(k_BGSD),
                _address(v_BGSE),
                _address(mask_BHTS),
                _address(out_BHTE),
                _address(lse_BHT),
            ),
            *(batch, heads, groups, tokens, key_tokens, width, value_width),
            *(-1 if mask_BHTS is None else MASK_DTYPES[mask_BHTS.dtype], *_steps(mask_BHTS)),
            *(scale, causal, self._threads()),
        )

    # Gradients

    def _rmsnorm_backward(
        self, g_RC: Tensor, x_RC: Tensor, weight_C: Tensor | None, eps: float, offset: float
    ) -> tuple[Tensor, Tensor | None]:
        dx = torch.empty_like(x_RC)
        dw = None if weight_C is None else torch.empty(x_RC.shape[1])
        dtypes = DTYPES[x_RC.dtype], _dtype(weight_C, x_RC)
        arrays = _address(g_RC), _address(x_RC), _address(weight_C), _address(dx), _address(dw)
        self._library.rmsnorm_backward(*dtypes, *arrays, *x_RC.shape, eps, offset, self._threads())
        return dx, dw

    def _layernorm_backward(
        self, g_RC: Tensor, x_RC: Tensor, weight_C: Tensor | None, with_bias: bool, eps: float
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        dx, sums = torch.empty_like(x_RC), torch.empty(2, x_RC.shape[1])
        dtypes = DTYPES[x_RC.dtype], _dtype(weight_C, x_RC)
        arrays = _address(g_RC), _address(x_RC), _address(weight_C), _address(dx), _address(sums)
        self._library.layernorm_backward(*dtypes, *arrays, with_bias, *x_RC.shape, eps, self._threads())
        return dx, None if weight_C is None else sums[0], sums[1] if with_bias else None

    def _softmax_backward(self, g_RC: Tensor, y_RC: Tensor) -> Tensor:
        dx = torch.empty_like(y_RC)
        arrays = _address(g_RC), _address(y_RC), _address(dx)
        self._library.softmax_backward(DTYPES[y_RC.dtype], *arrays, *y_RC.shape, self._threads())
        return dx

    def _silu_backward(self, g_RC: Tensor, x_RC: Tensor) -> Tensor:
        dx = torch.empty_like(x_RC)
        self._library.silu_backward(
            DTYPES[x_RC.dtype], _address(g_RC), _address(x_RC), _address(dx), x_RC.numel(), self._threads()
        )
        return dx

    def _swiglu_backward(self, g_RC: Tensor, gate_RC: Tensor, up_RC: Tensor) -> tuple[Tensor, Tensor]:
        grads = torch.empty_like(gate_RC), torch.empty_like(up_RC)
        arrays = _address(g_RC), _address(gate_RC), _address(up_RC), _address(grads[0]), _address(grads[1])
        self._library.swiglu_backward(DTYPES[gate_RC.dtype], *arrays, gate_RC.numel(), self._threads())
        return grads


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _size(x: Tensor) -> tuple[int, int]:
    columns = x.shape[-1]
    return x.numel() // columns, columns


def _dtype(vector: Tensor | None, like: Tensor) -> int:
    return DTYPES[(like if vector is None else vector).dtype]


def _same_dtype(weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Convert both to float32 if their dtypes differ, since the kernel takes one dtype for both."""
    if weight is None or bias is None or weight.dtype == bias.dtype:
        return weight, bias
    return weight.float(), bias.float()


def _steps(mask_BHTS: Tensor | None) -> list[int]:
    """Return the mask's stride in each dimension, 0 if the dimension is broadcast."""
    if mask_BHTS is None:
        return [0, 0, 0, 0]
    return [0 if size == 1 else step for size, step in zip(mask_BHTS.shape, mask_BHTS.stride(), strict=True)]


@cache
def _multiplies_bfloat16() -> bool:
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(cpu_features().split()))


@cache
def _has_tiles() -> bool:
    """Return whether the CPU multiplies tiles of bfloat16 (Intel's AMX), which torch's BLAS uses."""
    return "amx_bf16" in cpu_features().split()


@cache
def _processor() -> str:
    """Return the processor's model name, else what the platform reports."""
    try:
        with Path("/proc/cpuinfo").open() as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith(("model name", "Model"))]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
