"""Groups of an input's parts, and linear surrogates on masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from fedsim.explain.groups import (
    RIDGE,
    Groups,
    explained_variance,
    fit,
    group_parts,
    largest,
    unit,
)


def drawn(n: int = 60, G: int = 5, m: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Masks, outputs that depend on them in part, and a prior."""
    rng = np.random.default_rng(0)
    kept = rng.integers(2, size=(n, G), dtype=np.bool_)
    outputs = kept @ rng.standard_normal((G, m)) + 0.3 * rng.standard_normal((n, m)) - 4
    return kept, outputs, rng.standard_normal((m, G)) / 3


class TestGroups:
    @pytest.mark.parametrize(
        ("shape", "size", "count"),
        [
            ((1, 28, 28), None, 49),
            ((3, 32, 32), None, 49),  # 7 × 5 > 32: those at the edge have 2 pixels
            ((1, 8, 8), None, 16),
            ((1, 10, 20), None, 4 * 7),
            ((1, 3, 3), None, 9),
            ((3, 8, 8), 5, 4),
            ((6,), None, 6),
            ((3, 2), None, 6),
        ],
    )
    def test_how_many(self, shape: tuple[int, ...], size: int | None, count: int) -> None:
        groups = group_parts(shape, size)
        assert len(groups) == count
        assert groups.index.shape == (shape[1:] if len(shape) == 3 else shape)
        assert set(groups.index.flat) == set(range(count))

    def test_masked_squares_of_images(self) -> None:
        x, instead = torch.ones(2, 3, 4, 4), torch.full((3, 4, 4), 0.5)
        kept = np.array([[True, False, True, True], [True, True, True, False]])
        found = group_parts((3, 4, 4), 2).masked(x, kept, instead)
        expected = torch.ones(2, 3, 4, 4)
        expected[0, :, :2, 2:] = 0.5
        expected[1, :, 2:, 2:] = 0.5
        assert torch.equal(found, expected)

    def test_masked_features(self) -> None:
        x, instead = torch.ones(2, 3), torch.tensor([7.0, 8.0, 9.0])
        kept = np.array([[True, False], [False, True]])
        found = Groups(np.array([0, 1, 1])).masked(x, kept, instead)
        assert found.tolist() == [[1, 8, 9], [7, 1, 1]]


class TestSurrogates:
    @pytest.mark.parametrize("lam", [0.0, 0.7, 30.0])
    def test_they_minimise_the_objective(self, lam: float) -> None:
        """Its gradient, written out for each class, is zero."""
        kept, outputs, prior = drawn()
        beta = fit(kept, outputs, prior, lam)
        z, f = ((a - a.mean(axis=0)) / a.std(axis=0) for a in (kept.astype(float), outputs))
        for c in range(3):
            missed = z @ beta[c] - f[:, c]
            gradient = z.T @ missed / 60 + lam * (beta[c] - prior[c]) + RIDGE * beta[c]
            np.testing.assert_allclose(gradient, 0, atol=1e-12)

    def test_more_groups_than_masks(self) -> None:
        kept, outputs, prior = drawn(n=4, G=30)
        assert np.isfinite(fit(kept, outputs, prior, 0.0)).all()

    def test_outputs_and_masks_that_never_change(self) -> None:
        kept, outputs, _ = drawn()
        kept[:, 2], outputs[:, 1] = True, 0.1
        beta = fit(kept, outputs, np.zeros((3, 5)), 0.1)
        assert (beta[1] == 0).all()
        assert (beta[:, 2] == 0).all()
        r2 = explained_variance(kept, outputs, beta)
        assert np.isnan(r2).tolist() == [False, True, False]

    def test_the_variance_that_they_explain(self) -> None:
        kept, outputs, prior = drawn()
        beta = fit(kept, outputs, prior, 0.0)
        r2 = explained_variance(kept, outputs, beta)
        expected = [Ridge(1e-9).fit(kept, f).score(kept, f) for f in outputs.T]
        np.testing.assert_allclose(r2, expected, atol=1e-4)


def test_the_largest_come_in_order() -> None:
    rows = np.array([[0.1, -3, 2, 0], [0, 0, 0, 0]])
    assert largest(rows, 2).tolist() == [[1, 2], [0, 1]]
    np.testing.assert_allclose(unit(np.array([[3, -4], [0, 0]])), [[0.6, -0.8], [0, 0]])
