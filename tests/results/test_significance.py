"""Tests over seeds, against those of SciPy."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student
from scipy.stats import ttest_ind, ttest_rel

from fedsim.results.significance import compared, holm, paired, shown_p, stars


def series(values: list[float] | np.ndarray, first: int = 0) -> pd.Series:
    return pd.Series(values, index=range(first, first + len(values)))


@pytest.mark.parametrize("shift", [-3.0, 0.0, 0.1])
@pytest.mark.parametrize("seeds", [2, 3, 30])
@pytest.mark.parametrize("shared", [True, False])
def test_a_difference_is_that_of_scipy(shift: float, seeds: int, shared: bool) -> None:
    rng = np.random.default_rng(seeds)
    ours, theirs = rng.normal(shift, 1, seeds), rng.normal(0, 2, seeds)
    found = compared(series(ours), series(theirs, 0 if shared else 100))
    test = ttest_rel if shared else partial(ttest_ind, equal_var=False)
    expected = test(ours, theirs)
    assert found.pairs == (seeds if shared else 0)
    assert found.mean == pytest.approx(ours.mean() - theirs.mean())
    assert found.p() == pytest.approx(expected.pvalue)
    assert found.p(0.5) == pytest.approx(test(ours - 0.5, theirs).pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    back = compared(series(theirs, 0 if shared else 100), series(ours))
    assert (back.mean, back.p()) == pytest.approx((-found.mean, found.p()))  # two-tailed


def test_unequal_numbers_of_runs_and_twins() -> None:
    ours, theirs = np.array([0.5, 0.7, 0.9, 0.6]), np.array([0.2, 0.3])
    found = compared(series(ours), series(theirs, 100))
    assert found.p() == pytest.approx(ttest_ind(ours, theirs, equal_var=False).pvalue)
    twins = pd.Series([0.4, 0.6, 0.7], index=[0, 0, 1])  # of a seed's runs the mean counts
    assert compared(twins, series([0.1, 0.4])) == paired(series([0.5, 0.7]), series([0.1, 0.4]))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (series([0.8, 0.7, 0.6]), series([0.7, 0.6, 0.5])),  # equal but for rounding
        (series([0.8, 0.7]), series([0.8, 0.7])),
        (series([0.8]), series([0.7])),
        (series([0.8, math.nan]), series([0.7, 0.2])),
        (series([0.8, 0.7]), series([0.1], 9)),
        (series([]), series([0.1, 0.2])),
        (series([0.91, 0.92, 0.93]), series([0.90, 0.91, 0.92])),
        (series([0.1, 0.1, 0.1]), series([0.3, 0.3, 0.3], 9)),  # neither varies but by rounding
    ],
)
def test_without_variance_there_is_no_test(ours: pd.Series, theirs: pd.Series) -> None:
    found = compared(ours, theirs)
    figures = (found.p(), found.p(0.5), found.sem, found.low, found.high, found.detectable)
    assert all(map(math.isnan, figures))
    assert str(found) == f"{found.mean:+z.3f}".replace("-", "−")


def test_one_side_that_does_not_vary_is_tested() -> None:
    found = compared(series([0.5, 0.5]), series([0.2, 0.3, 0.1], 9))
    assert found.p() == pytest.approx(2 * student.sf(0.3 * 3**0.5 / 0.1, 2))


def test_what_shares_some_seeds_is_paired_by_these() -> None:
    found = compared(series([0.1, 0.2, 0.3, 0.9]), series([0.0, 0.3, 0.5], 1))
    assert found == paired(series([0.2, 0.3, 0.9], 1), series([0.0, 0.3, 0.5], 1))


@given(st.lists(st.floats(0, 1) | st.just(math.nan), max_size=12))
def test_holm_is_that_of_its_definition(p: list[float]) -> None:
    known = sorted(x for x in p if not math.isnan(x))
    for x, found in zip(p, holm(p), strict=True):
        if math.isnan(x):
            assert math.isnan(found)
        else:
            before = [(len(known) - k) * y for k, y in enumerate(known) if y <= x]
            assert found == pytest.approx(min(1, max(before[: known.index(x) + 1])))


def test_so_is_p_shown() -> None:
    values = [0.2, 0.04, 0.002, 1e-9, math.nan]
    assert [*map(shown_p, values)] == ["0.2000", "0.0400", "0.0020", "< 0.0001", "nan"]
    assert [*map(stars, values)] == ["", "*", "**", "***", ""]
