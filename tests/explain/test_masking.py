"""Masks that keep what is relevant."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsim.explain.masking import keep_relevant, scaled


def test_the_released_codes_count() -> None:
    """Of 32×32 pixels, s = 80 keeps 206."""
    kept = keep_relevant(torch.randn(5, 32, 32, generator=torch.Generator().manual_seed(0)), 80)
    assert kept.dtype == torch.bool
    assert (kept.flatten(1).sum(dim=1) == 206).all()


@given(
    side=st.integers(1, 9),
    removed=st.floats(0, 99.9),
    seed=st.integers(0, 2**31),
)
def test_the_most_relevant_are_kept(side: int, removed: float, seed: int) -> None:
    heatmaps = torch.tensor(np.random.default_rng(seed).permutation(side * side * 3).astype(float))
    heatmaps = heatmaps.view(3, side, side)
    kept = keep_relevant(heatmaps, removed)
    k = int(side * side * removed / 100)
    for h, m in zip(heatmaps, kept, strict=True):
        assert m.sum() == (side * side - k + 1 if k else side * side)
        if (~m).any():
            assert h[m].min() > h[~m].max()


def test_equal_relevances_stay_together() -> None:
    assert keep_relevant(torch.zeros(1, 4, 4), 50).all()
    heatmaps = torch.tensor([[[0.0, 1.0], [1.0, 1.0]]])
    assert keep_relevant(heatmaps, 75).tolist() == [[[False, True], [True, True]]]


def test_scaled_from_least_to_greatest() -> None:
    heatmaps = torch.tensor([[[-2.0, 0.0], [1.0, 2.0]], [[3.0, 3.0], [3.0, 3.0]]])
    found = scaled(heatmaps)
    assert found[0].tolist() == [[0, 0.5], [0.75, 1]]
    assert found[1].tolist() == [[0, 0], [0, 0]]
