"""Rates that nobody measured: exact where kinds differ alike for all workloads, and never from too few."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.plan.arrays.completion import MIN_SHARED_WORKLOADS, estimate_rates

rates = st.floats(0.01, 1e6)


@settings(deadline=None, max_examples=100)
@given(
    work=st.lists(rates, min_size=MIN_SHARED_WORKLOADS + 1, max_size=12), kinds=st.lists(rates, min_size=2, max_size=5)
)
def test_it_is_exact_where_all_workloads_see_kinds_alike(work, kinds):
    whole = np.outer(work, kinds)
    table = whole.copy()
    table[0, 1:] = np.nan
    found = estimate_rates(table)
    assert found.rate[0, 1:] == pytest.approx(whole[0, 1:], rel=1e-6)
    assert set(found.count[0, 1:].tolist()) == {len(work) - 1}
    assert np.isnan(found.rate[1:]).all() and np.isnan(found.rate[0, 0]), "what was measured is not estimated"


@settings(deadline=None, max_examples=100)
@given(
    table=st.integers(4, 9).flatmap(
        lambda rows: st.lists(st.lists(rates, min_size=3, max_size=3), min_size=rows, max_size=rows)
    ),
    factor=st.floats(0.1, 10.0),
)
def test_the_interval_holds_the_estimate_and_a_factor_of_a_workload_is_one_of_its_estimates(table, factor):
    seen = np.array(table)
    seen[0, 1:] = np.nan
    found = estimate_rates(seen)
    assert found.low[0, 2] <= found.rate[0, 2] * (1 + 1e-9) and found.rate[0, 2] <= found.high[0, 2] * (1 + 1e-9)
    seen[0] *= factor
    assert estimate_rates(seen).rate[0, 2] == pytest.approx(factor * found.rate[0, 2], rel=1e-6)


def test_nothing_is_estimated_from_too_few_workloads_or_of_one_that_nobody_measured():
    table = np.ones((MIN_SHARED_WORKLOADS, 2))
    table[0, 1] = np.nan
    assert np.isnan(estimate_rates(table).rate).all()
    table = np.ones((MIN_SHARED_WORKLOADS + 3, 2))
    table[0] = np.nan
    assert np.isnan(estimate_rates(table).rate).all()


def test_nothing_is_estimated_of_a_workload_that_was_measured_on_two_kinds():
    table = np.ones((MIN_SHARED_WORKLOADS + 3, 3))
    table[0, 2] = np.nan
    assert np.isnan(estimate_rates(table).rate).all()
    assert estimate_rates(table, max_measured=2).rate[0, 2] == 1.0
