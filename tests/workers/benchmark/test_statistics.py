"""Ratios, intervals and verdicts: exact where theory is exact, and honest on noise that is known."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.measurement import statistics
from workers.measurement.statistics import Ratio, Verdict, verdict


def rounds(seed, count=15, noise=0.01, shift=1.0):
    """Times of two arms in rounds that share a disturbance; the arm is `shift` times as fast."""
    random = np.random.default_rng(seed)
    shared = np.exp(random.normal(0, 0.2, count))
    reference, arm = (shared * np.exp(random.normal(0, noise, count)) for _ in range(2))
    return list(reference), list(arm / shift)


@pytest.mark.parametrize(
    ("n", "low", "high"), [(6, 1, 6), (10, 2, 9), (12, 3, 10), (15, 4, 12), (20, 6, 15), (100, 40, 61)]
)
def test_the_interval_of_the_median_has_the_ranks_of_the_binomial_table(n, low, high):
    """Ranks as in W. J. Conover's tables of distribution-free intervals, Practical Nonparametric Statistics."""
    assert statistics.interval(range(n, 0, -1)) == ((n + 1) / 2, low, high)


def test_fewer_than_six_samples_are_answered_with_their_extremes():
    assert statistics.interval([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    assert statistics.interval([4.0]) == (4.0, 4.0, 4.0)


def test_the_interval_holds_the_true_median_as_often_as_it_claims():
    random = np.random.default_rng(5)
    found = [statistics.interval(random.normal(size=25)) for _ in range(1000)]
    assert sum(low <= 0 <= high for _, low, high in found) >= 940


def test_a_spread_has_the_outer_percentiles_beside_the_interval():
    told = statistics.spread([float(n) for n in range(101)])
    assert told == {"median": 50.0, "low": 40.0, "high": 60.0, "p5": 5.0, "p95": 95.0}


def test_what_disturbs_a_whole_round_drops_out_of_the_ratio():
    found = statistics.paired(*rounds(1, shift=1.1))
    assert 1.08 < found.low < found.ratio < found.high < 1.12


def test_wilcoxon_s_p_is_exact():
    logs = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    assert statistics.wilcoxon(logs) == pytest.approx(2 / 2**9)
    logs[0] = -0.1
    assert statistics.wilcoxon(logs) == pytest.approx(4 / 2**9)
    assert statistics.wilcoxon(np.zeros(9)) == 1.0


def test_ties_share_their_ranks_and_prove_nothing_by_themselves():
    assert statistics.wilcoxon(np.array([0.1, -0.1, 0.1, -0.1])) == 1.0
    # of four equal sizes with three positive signs: 1 + 4 of 16 ways are as far from even on each side
    assert statistics.wilcoxon(np.array([0.1, -0.1, 0.1, 0.1])) == pytest.approx(10 / 16)
    assert statistics.unpaired([1.0] * 9, [1.0] * 9).p == 1.0


def test_the_tests_ways_are_those_of_the_books():
    assert statistics.signed_rank_counts((1, 2, 3)) == (1, 1, 1, 2, 1, 1, 1)
    assert statistics.rank_sum_counts(2, 2) == (1, 1, 2, 1, 1)
    assert sum(statistics.rank_sum_counts(9, 15)) == math.comb(24, 9)


def test_holm_stops_at_the_first_that_does_not_hold():
    assert statistics.holm([0.01, 0.04, 0.03, 0.5]) == [True, False, False, False]
    assert statistics.holm([0.01, 0.015, 0.02, 0.5]) == [True, True, True, False]
    assert statistics.holm([]) == []


@pytest.mark.parametrize(("comparisons", "least"), [(1, 9), (12, 9), (100, 12), (1000, 16)])
def test_rounds_grow_with_the_comparisons_they_must_prove(comparisons, least):
    assert statistics.minimum_rounds(comparisons) == least
    assert 2 / 2**least <= 0.05 / comparisons


@pytest.mark.parametrize(
    ("ratio", "low", "high", "noise", "holds", "expected"),
    [
        (1.2, 1.1, 1.3, 0.0, True, Verdict.FASTER),
        (0.8, 0.7, 0.9, 0.0, True, Verdict.SLOWER),
        (1.2, 1.1, 1.3, 0.0, False, Verdict.INCONCLUSIVE),
        (1.2, 0.9, 1.5, 0.0, True, Verdict.INCONCLUSIVE),
        (1.01, 1.005, 1.015, 0.0, True, Verdict.SAME),
        (1.2, 1.1, 1.3, 0.5, True, Verdict.INCONCLUSIVE),
        (1.03, 1.02, 1.04, 0.5, True, Verdict.SAME),
        (1.04, 1.03, 1.05, 0.045, True, Verdict.INCONCLUSIVE),
    ],
)
def test_a_verdict_needs_an_interval_an_effect_and_a_proof(ratio, low, high, noise, holds, expected):
    assert verdict(Ratio(ratio, low, high, 0.001, 12), noise, holds) is expected


@given(st.lists(st.tuples(st.floats(1e-6, 10), st.floats(1e-6, 10)), min_size=3, max_size=30))
def test_the_verdict_does_not_depend_on_which_side_is_called_the_reference(pairs):
    a, b = zip(*pairs, strict=True)
    one, other = statistics.paired(a, b), statistics.paired(b, a)
    assert one.ratio * other.ratio == pytest.approx(1)
    assert one.p == other.p
    one, other = statistics.unpaired(a, b), statistics.unpaired(b, a)
    assert one.p == other.p and one.ratio * other.ratio == pytest.approx(1)
    assert one.low <= one.ratio <= one.high


def test_the_same_against_itself_is_almost_never_called_different():
    covered = [statistics.paired(*rounds(seed, noise=0.05)) for seed in range(1000)]
    assert sum(found.low <= 1 <= found.high for found in covered) >= 0.93 * 1000
    assert sum(found.p <= 0.05 for found in covered) <= 0.07 * 1000


def test_a_difference_beyond_the_noise_is_found_on_one_host_and_on_two():
    same_host = [verdict(statistics.paired(*rounds(seed, shift=1.1)), 0.02) for seed in range(40)]
    assert same_host.count(Verdict.FASTER) >= 39
    random = np.random.default_rng(0)
    a, b = (list(np.exp(random.normal(0, 0.02, 15)) / s) for s in (1.0, 1.5))
    assert verdict(statistics.unpaired(a, b), 0.02) is Verdict.FASTER


def test_the_noise_is_how_far_the_same_was_told_from_the_same():
    assert statistics.control_noise(Ratio(1.0, 0.9, 1.05, 1.0, 12)) == pytest.approx(1 / 0.9 - 1)
    assert math.isclose(statistics.control_noise(Ratio(1.0, 0.99, 1.05, 1.0, 12)), 0.05)
