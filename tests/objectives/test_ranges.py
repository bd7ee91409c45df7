"""Scores stay in the range that their definition has, whatever they are of."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedsim.explain.groups import explained_variance
from fedsim.objectives import metrics
from fedsim.objectives.regression import Regression

# Few different values, so that ties, constants and repeated rows are common.
VALUES = st.sampled_from([0.1, 0.3, -0.7, 1 / 3, 1e-9, 1e6, 3e7 + 0.1])
PAIRS = st.integers(2, 9).flatmap(
    lambda n: st.tuples(arrays(float, n, elements=VALUES), arrays(float, n, elements=VALUES))
)
CLASSES = st.integers(1, 9).flatmap(
    lambda n: st.tuples(
        arrays(np.float32, (n, 3), elements=st.floats(-99, 99, width=32)),
        arrays(np.int64, n, elements=st.integers(0, 2)),
    )
)


@pytest.mark.parametrize("score", [metrics.pearson, metrics.spearman])
@given(PAIRS)
def test_correlations(score: Callable[..., float], pair: Any) -> None:
    x, y = pair
    assert -1 <= score(x, x + 0) <= 1 or np.ptp(x) == 0
    found = score(x, y)
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        assert math.isnan(found)
    else:
        assert -1 <= found <= 1


@given(PAIRS)
def test_r2(pair: Any) -> None:
    x, y = pair
    found = Regression().scores_of(x, y)
    assert math.isnan(found["r2"]) if np.ptp(y) == 0 else found["r2"] <= 1
    assert min(found["rmse"], found["mae"]) >= 0


@given(PAIRS)
def test_explained_variance(pair: Any) -> None:
    x, y = pair
    found = explained_variance((x > y)[:, None], y[:, None], np.ones((1, 1)))
    assert math.isnan(found[0]) if np.ptp(y) == 0 else found[0] <= 1


@pytest.mark.parametrize(
    "score",
    [metrics.auroc, metrics.balanced_accuracy, metrics.ece, metrics.macro_f1],
)
@given(CLASSES)
@settings(deadline=None)  # scikit-learn is imported in the first call
def test_shares(score: Callable[..., float], pair: Any) -> None:
    outputs, targets = pair
    found = score(outputs, targets)
    assert 0 <= found <= 1 or (score is metrics.auroc and len(np.unique(targets)) == 1)
