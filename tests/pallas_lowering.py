"""Lowers for TPUs what the Pallas kernels run for cases of the contract, without a TPU. A program of its own, because
jax.export starts JAX's platforms in the process: `python tests/pallas_lowering.py` prints each function and its arrays.
"""

from importlib import import_module
from typing import Any

import jax
import jax.export
import numpy as np
import torch
from kernel_cases import CASES, draw, given

from workers.kernels import create

NAMES = {
    *("rmsnorm-17x257", "rmsnorm-2x65537", "rmsnorm-no-weight"),
    *("rmsnorm-gemma-rounded", "layernorm-5x127", "layernorm-1x131072", "layernorm-in-float32"),
    *("softmax-5x127", "softmax-2x65537", "silu-17x257", "swiglu-3x13", "matmul-both-transposed"),
    *("matmul_vec-257x130", "weighted_sum_rows-130x257", "apply_rope-pairs-partial", "apply_rope-halves-partial"),
    *("compute_attention_scores-2x4x2x5x7x16", "attention-primes", "attention-decode"),
    *("attention-causal-longer-past", "attention-bool-mask", "attention-float-mask"),
}
LOWERED: dict[Any, Any] = {}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def main() -> None:
    kernels = create("pallas", platform="cpu")
    kernels.driver.run = lower
    for case in (case for case in CASES if str(case) in NAMES):
        for dtype in DTYPES:
            getattr(kernels, case.operation)(*given(case, dtype), **case.options)
    q, k = draw(1, 4, 600, 128), draw(1, 2, 1100, 128)
    kernels.attention(q, k, k, causal=True, return_lse=True)
    kernels.attention(q.bfloat16(), k.bfloat16(), k.bfloat16(), mask=draw(600, 1100) > 0, return_lse=True)


def lower(module: str, name: str, *arrays: Any, **constants: Any) -> Any:
    """Stands for Driver.run: prints what is lowered, and answers zeros in the shapes of the results."""
    if name == "converted":
        return np.zeros(arrays[0].shape, constants["dtype"])
    key = module, name, *((one.shape, one.dtype) for one in arrays if one is not None), *constants.items()
    if key not in LOWERED:
        LOWERED[key] = lowered(module, name, arrays, constants)
    return LOWERED[key]


def lowered(module: str, name: str, arrays: Any, constants: dict[str, Any]) -> Any:
    function = getattr(import_module(f"workers.kernels.sources.pallas_{module}"), name)
    of_pallas = "interpret" in constants
    if of_pallas:
        constants["interpret"] = False
    compiled = jax.jit(lambda *arrays: function(*arrays, **constants))
    made = jax.export.export(compiled, platforms=["tpu"])(*arrays)
    assert made.platforms == ("tpu",)
    assert ("tpu_custom_call" in made.mlir_module()) == of_pallas
    print("pallas" if of_pallas else "xla", name, *(one.dtype for one in made.in_avals))
    results = [np.zeros(one.shape, one.dtype) for one in made.out_avals]
    return results if name == "attention" else results[0]


if __name__ == "__main__":
    main()
