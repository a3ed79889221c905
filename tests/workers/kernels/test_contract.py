"""One contract for all kernels: each implementation x operation x dtype x shape against float64."""

import pytest
import torch
from kernel_cases import CASES, DTYPES, check, rounded_share

from workers.kernels import VARIANTS, create, sdpa

NOT_HELD = {
    ("triton", "rmsnorm-tiny", torch.bfloat16),
    ("pallas", "rmsnorm-tiny", torch.float32),
    ("pallas", "rmsnorm-tiny", torch.bfloat16),
}
"""Triton's interpreter garbles subnormal numbers of bfloat16 when it reads them; a compiled kernel does not. XLA reads
those of float32 and bfloat16 as 0, on CPUs as TPUs do."""


def failure(kernels, case, dtype) -> str:
    """What is wrong with the result of a case; "" if nothing is."""
    try:
        check(kernels, case, dtype)
    except AssertionError as error:
        return str(error) or "wrong"
    except Exception as error:
        error.add_note(f"in the case {case}")
        raise
    return ""


@pytest.mark.parametrize("dtype", DTYPES, ids=("f32", "f16", "bf16"))
@pytest.mark.parametrize("operation", sorted({case.operation for case in CASES}))
def test_results_are_as_near_to_float64_as_their_dtype_allows(kernels, operation, dtype, dtypes_of):
    """One test for all cases of an operation: as 4,000 tests they took a quarter more CPU time."""
    numbered = enumerate(case for case in CASES if case.operation == operation)
    cases = {str(case): case for number, case in numbered if dtype in dtypes_of(kernels, number)}
    wrong = {name: why for name, case in cases.items() if (why := failure(kernels, case, dtype))}
    expected = {case for name, case, kind in NOT_HELD if (name, kind) == (kernels.name, dtype)}
    expected = {case for case in expected & cases.keys() if kernels.interpreted}
    assert wrong.keys() == expected, "\n".join(f"{case}: {why}" for case, why in wrong.items())
    if kernels.name == "pallas":
        kernels.close()  # hundreds of its interpreter's programs take 0.7 GB of a process


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
