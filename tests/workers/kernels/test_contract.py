"""One contract for all kernels: each implementation x operation x dtype x shape against float64."""

import pytest
import torch
from kernel_cases import CASES, check, rounded_share

from workers.kernels import VARIANTS, create, sdpa

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NOT_HELD = {
    ("triton", "rmsnorm-tiny", torch.bfloat16),
    ("pallas", "rmsnorm-tiny", torch.float32),
    ("pallas", "rmsnorm-tiny", torch.bfloat16),
}
"""Triton's interpreter garbles subnormal numbers of bfloat16 when it reads them; a compiled kernel does not. XLA reads
those of float32 and bfloat16 as 0, on CPUs as TPUs do."""


@pytest.mark.parametrize("dtype", DTYPES, ids=("f32", "f16", "bf16"))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_as_near_to_float64_as_their_dtype_allows(kernels, case, dtype):
    if kernels.interpreted and (kernels.name, str(case), dtype) in NOT_HELD:
        with pytest.raises(AssertionError):
            check(kernels, case, dtype)
        return
    check(kernels, case, dtype)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=("f16", "bf16"))
def test_results_are_rounded_to_nearest(kernels, dtype):
    if kernels.interpreted and kernels.name == "triton":
        pytest.skip("Triton's interpreter cuts bits off where a device rounds")
    assert rounded_share(kernels, dtype) > 0.97


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=("f32", "f16", "bf16"))
@pytest.mark.parametrize("variant", VARIANTS["torch"])
def test_each_of_torchs_kernels_for_attention_is_right_on_a_gpu(variant, dtype):
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU of NVIDIA or AMD here")
    if variant not in sdpa.usable(torch.device("cuda")):
        pytest.skip(f"{torch.cuda.get_device_name()} has no kernel {variant!r}")
    kernels = create(f"torch:{variant}", "cuda")
    for case in CASES:
        if case.operation == "attention":
            check(kernels, case, dtype)
