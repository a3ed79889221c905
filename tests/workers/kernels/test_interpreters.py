"""Kernels that an interpreter runs: each case in the dtypes in which the gate does not compute it."""

import pytest
from kernel_cases import dtypes_left_out

from tests.workers.kernels.test_contract import test_results_are_as_near_to_float64_as_their_dtype_allows
from tests.workers.kernels.test_gradients import (
    test_attention_gives_gradients_of_all_three,
    test_layernorm_gives_gradients_of_rows_weight_and_bias,
    test_rmsnorm_gives_gradients_of_rows_and_weight,
    test_softmax_and_gates_give_gradients,
)

pytestmark = [pytest.mark.full, pytest.mark.parametrize("kernels", ["triton", "pallas"], indirect=True)]
__all__ = [
    "test_attention_gives_gradients_of_all_three",
    "test_layernorm_gives_gradients_of_rows_weight_and_bias",
    "test_results_are_as_near_to_float64_as_their_dtype_allows",
    "test_rmsnorm_gives_gradients_of_rows_and_weight",
    "test_softmax_and_gates_give_gradients",
]


@pytest.fixture
def dtypes_of(kernels):
    if not kernels.interpreted:
        pytest.skip(f"{kernels.name} has a device here: the gate computes every case in every dtype")
    return dtypes_left_out
