import random
import statistics

import pytest
import torch

from workers import backends
from workers.tasks.measure import measure, median_interval, row


@pytest.mark.parametrize(("n", "low", "high"), [(6, 1, 6), (10, 2, 9), (15, 4, 12), (20, 6, 15), (100, 40, 61)])
def test_the_interval_of_the_median_has_the_ranks_of_the_binomial_table(n, low, high):
    """Ranks as in W. J. Conover's tables of distribution-free intervals, Practical Nonparametric Statistics."""
    assert median_interval(range(1, n + 1))[1:] == (low, high)


def test_fewer_than_six_samples_are_answered_with_their_extremes():
    assert median_interval([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    assert median_interval([4.0]) == (4.0, 4.0, 4.0)


def test_the_interval_holds_the_true_median_as_often_as_it_claims():
    source = random.Random(5)
    held = sum(
        low <= 0 <= high
        for _, low, high in (median_interval([source.gauss(0, 1) for _ in range(25)]) for _ in range(1000))
    )
    assert held >= 940


def test_first_call_and_warm_up_are_apart_and_rounds_are_all_kept():
    calls = []
    timing = measure(lambda: calls.append(1) or torch.ones(2), backends.create("cpu"), warmup=2, rounds=4)
    assert len(calls) == 1 + 2 + 4
    assert len(timing.samples_s) == 4
    assert timing.output.tolist() == [1.0, 1.0]
    line = row("forward", timing, items=8)
    assert line["median_s"] == statistics.median(timing.samples_s)
    assert line["ci_low_s"] <= line["median_s"] <= line["ci_high_s"]
    assert line["items_per_s"] == 8 / line["median_s"]
