"""One contract for all kernels: each implementation x operation x dtype x shape against float64."""

from collections.abc import Iterator

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


def failures(kernels, operation, dtype) -> Iterator[tuple[str, str]]:
    """Names of the operation's cases whose result is wrong, with what is wrong."""
    for case in CASES:
        if case.operation == operation:
            try:
                check(kernels, case, dtype)
            except AssertionError as error:
                yield str(case), str(error)
            except Exception as error:
                error.add_note(f"in the case {case}")
                raise


@pytest.mark.parametrize("dtype", DTYPES, ids=("f32", "f16", "bf16"))
@pytest.mark.parametrize("operation", sorted({case.operation for case in CASES}))
def test_results_are_as_near_to_float64_as_their_dtype_allows(kernels, operation, dtype):
    """One test for all cases of an operation: as 4,000 tests they took a quarter more CPU time."""
    wrong = dict(failures(kernels, operation, dtype))
    expected = {case for name, case, kind in NOT_HELD if (name, kind) == (kernels.name, dtype)}
    expected = {case for case in expected if kernels.interpreted and case.startswith(f"{operation}-")}
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
