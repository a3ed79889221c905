"""Errors and tolerances: one wrong element is found, rounding is not, and exchanging the sides changes nothing."""

import pytest
import torch

from workers.measurement.accuracy import Rounding, measure

SIZE = 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_within_the_tolerance_and_one_wrong_element_is_not(dtype):
    torch.manual_seed(0)
    a, b = torch.randn(64, SIZE), torch.randn(SIZE, 64)
    want = a.to(dtype).double() @ b.to(dtype).double()
    have = a.to(dtype) @ b.to(dtype)
    told = measure(have, want, Rounding(dtype, SIZE))
    assert (told["ok"], told["reason"], told["non_finite"]) == (True, "", 0)
    assert told["cosine"] > 0.9999 and told["rms_rel"] < 0.01 and told["scaled"] < 8
    have[3, 5] += 0.1 * want.abs().mean()
    wrong = measure(have, want, Rounding(dtype, SIZE))
    assert (wrong["ok"], wrong["reason"]) == (False, "errors beyond the tolerance of its dtype")
    assert wrong["max_abs"] > told["max_abs"]


def test_exchanging_the_sides_changes_no_verdict():
    torch.manual_seed(1)
    want = torch.randn(1000, dtype=torch.float64)
    for shift in (0.0, 1e-6, 1e-4):
        have = want + shift * torch.randn(1000, dtype=torch.float64)
        one, other = (measure(*pair, Rounding(torch.float32)) for pair in ((have, want), (want, have)))
        assert (one["ok"], one["max_abs"], one["atol"]) == (other["ok"], other["max_abs"], other["atol"])


def test_what_is_not_finite_must_be_so_on_both_sides():
    want = torch.tensor([1.0, float("nan"), float("inf"), 2.0])
    assert measure(want.clone(), want, Rounding(torch.float32))["ok"]
    told = measure(torch.tensor([1.0, 0.0, float("-inf"), 2.0]), want, Rounding(torch.float32))
    assert (told["ok"], told["non_finite"]) == (False, 2)
    nothing = measure(torch.full((3,), float("nan")), torch.full((3,), float("nan")), Rounding(torch.float32))
    assert (nothing["ok"], "no value is finite" in nothing["reason"]) == (False, True)


def test_other_shapes_are_wrong_and_empty_ones_right():
    assert not measure(torch.zeros(2), torch.zeros(3), Rounding(torch.float32))["ok"]
    assert measure(torch.zeros(0), torch.zeros(0), Rounding(torch.float32))["ok"]


def test_ulp_counts_steps_of_the_dtype():
    want = torch.ones(100)
    told = measure(want + 3 * torch.finfo(torch.float32).eps, want, Rounding(torch.float32))
    assert told["ulp_p99"] == pytest.approx(3)


def test_gradients_are_judged_as_a_vector():
    torch.manual_seed(2)
    want = torch.randn(10_000)
    have = want.clone()
    have[0] += 0.01  # a single one as far off as noise may be
    assert not measure(have, want, Rounding(torch.float32))["ok"]
    assert measure(have, want, Rounding(torch.float32), normwise=True)["ok"]
    assert not measure(have + 0.02, want, Rounding(torch.float32), normwise=True)["ok"]
    assert measure(want * (1 + 1e-7), want, Rounding(torch.float32), normwise=True)["ok"]
