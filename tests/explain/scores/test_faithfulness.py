"""Scores that ask the model: each against its formula in slow loops, and against Captum's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.signal import convolve2d
from scipy.stats import spearmanr
from torch import Tensor, nn

from experiments import Later
from fedsim.explain.scores.faithfulness import (
    Predict,
    area,
    by_part,
    comprehensiveness,
    deletion_curve,
    infidelity,
    insertion_curve,
    monotonicity,
    present,
    selectivity,
    sensitivity,
    sufficiency,
    without,
)
from fedsim.explain.scores.road import imputed, road

metrics: Any = Later("captum.metrics")
SHAPES = {"image": (4, 2, 3, 5), "table": (4, 7), "series": (4, 3, 2)}
LENGTHS = (9, 5, 1, 0)  # words of the documents
KINDS = (*SHAPES, "documents")
SHARES = (0.01, 0.07, 0.2, 0.5, 1.0)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def inputs(kind: str) -> Tensor:
    if kind == "documents":
        x = torch.from_numpy(rng().integers(1, 30, (len(LENGTHS), 9)))
        return x * (torch.arange(9) < torch.tensor(LENGTHS)[:, None])
    return torch.from_numpy(rng().standard_normal(SHAPES[kind])).float()


def relevances(kind: str) -> NDArray[np.float64]:
    """Signed, no two alike; what is said of padding must not matter."""
    return rng(1).standard_normal(present(inputs(kind)).shape)


def predict(x: Tensor) -> Tensor:
    """Each part counts otherwise, each place of a document does, and each input is judged so."""
    rows = x.flatten(1).double()
    weights = torch.linspace(-1, 2, rows.shape[1], dtype=torch.float64)
    return torch.tanh(0.1 * rows @ weights + 0.1 * (torch.arange(len(x)) % len(LENGTHS)))


def asked(x: Tensor, i: int) -> float:
    """The value of input i, which is the only one that is as it should be."""
    others = torch.zeros_like(x[:1]).expand(len(LENGTHS), *x.shape[1:]).clone()
    others[i] = x[0]
    return float(predict(others)[i])


def slowly_without(row: Tensor, gone: Sequence[int]) -> Tensor:
    """An input (1, ...) without some of its parts, one at a time."""
    if not row.is_floating_point():
        left = [t for p, t in enumerate(row[0].tolist()) if p not in gone and t]
        return torch.tensor([left + [0] * (row.shape[1] - len(left))])
    row = row.clone()
    for p in gone:
        if row.dim() == 4:
            row[:, :, p // row.shape[3], p % row.shape[3]] = 0
        else:
            row.view(-1)[p] = 0
    return row


def slowly(kind: str, i: int, share: float, kept: bool) -> float:
    """The value of input i without its share of most relevant parts, or with nothing else."""
    x, relevance = inputs(kind)[i : i + 1], relevances(kind)[i]
    parts = LENGTHS[i] if kind == "documents" else len(relevance)
    falling = sorted(range(parts), key=lambda p: (-relevance[p], p))
    most = falling[: math.ceil(round(share * parts, 9))]
    return asked(slowly_without(x, [p for p in range(parts) if (p in most) != kept]), i)


class TestParts:
    @pytest.mark.parametrize("kind", KINDS)
    def test_without(self, kind: str) -> None:
        x = inputs(kind)
        before, every = x.clone(), np.ones(present(x).shape, bool)
        for removed in (rng(2).random(every.shape) < 0.4, ~every, every):
            found = without(x, removed)
            expected = [
                slowly_without(x[i : i + 1], removed[i].nonzero()[0].tolist())
                for i in range(len(x))
            ]
            assert found.dtype == x.dtype
            assert torch.equal(found, torch.cat(expected))
        assert torch.equal(x, before)

    def test_present(self) -> None:
        assert present(inputs("image")).shape == (4, 15)
        assert present(inputs("series")).shape == (4, 6)
        assert present(inputs("image")).all()
        assert present(inputs("documents")).sum(axis=1).tolist() == list(LENGTHS)

        x = inputs("image")
        np.testing.assert_allclose(by_part(x), x.double().sum(dim=1).flatten(1))
        assert by_part(inputs("series")).shape == (4, 6)
        assert by_part(inputs("documents")).dtype == np.float64


class TestSharesOfParts:
    """Curves, comprehensiveness and sufficiency."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_against_slow_loops(self, kind: str) -> None:
        x, relevance = inputs(kind), relevances(kind)
        whole = [asked(x[i : i + 1], i) for i in range(4)]
        for curve, score, kept in (
            (deletion_curve, comprehensiveness, False),
            (insertion_curve, sufficiency, True),
        ):
            for steps in (1, 4, 20):
                found = curve(predict, x, relevance, steps)
                expected = [
                    [slowly(kind, i, s / steps, kept) for s in range(steps + 1)] for i in range(4)
                ]
                assert found.dtype == np.float64
                np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)
            lost = [
                sum(whole[i] - slowly(kind, i, share, kept) for share in SHARES) / len(SHARES)
                for i in range(4)
            ]
            assert score(predict, x, relevance, SHARES) == pytest.approx(lost, abs=1e-9)

    def test_padding_does_not_matter(self) -> None:
        """However long the documents beside it are, one scores the same."""
        short = inputs("documents")[1:2, :5]

        def first_word(x: Tensor) -> Tensor:
            return x[:, 0].double()

        long = torch.cat([short, torch.zeros(1, 40, dtype=torch.int64)], dim=1)
        relevance = np.array([[-1.0, -5, -2, -4, -3]])
        padded = np.pad(relevance, ((0, 0), (0, 40)))
        for score in (deletion_curve, insertion_curve, comprehensiveness, sufficiency):
            found = score(first_word, long, padded)
            assert found.tolist() == score(first_word, short, relevance).tolist()

    def test_a_share_that_is_whole_is_not_rounded_up(self) -> None:
        """7 of 100, although 0.07 times 100 is a little more."""
        x = torch.ones(1, 100)
        assert comprehensiveness(lambda x: x.sum(dim=1), x, by_part(x), (0.07,)).tolist() == [7]


class TestEqualParts:
    """They have no order: the mean over several, whatever their index."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_area_of_an_additive_value_is_exact(self, kind: str) -> None:
        """Parts of a group go one by one, each of its mean worth."""
        x = inputs(kind)
        relevance = rng(1).standard_normal(present(x).shape).round(0)

        def total(x: Tensor) -> Tensor:
            return x.flatten(1).double().sum(dim=1)

        for i, row in enumerate(relevance):
            one, there = x[i : i + 1], present(x)[i : i + 1]
            parts = int(there.sum())
            if not parts:
                continue
            alone = np.eye(len(row), dtype=bool)
            worth = [float(total(one) - total(without(one, p[None]))) for p in alone]
            order = sorted(range(parts), key=lambda p: -row[p])
            lost = [np.mean([worth[q] for q in range(parts) if row[q] == row[p]]) for p in order]
            expected = float(total(one)) - np.cumsum([0, *lost])
            found = area(deletion_curve(total, one, row[None], parts))
            np.testing.assert_allclose(found, np.trapezoid(expected, dx=1 / parts), atol=1e-4)

    def test_a_map_of_one_value_scores_what_random_orders_do(self) -> None:
        x = inputs("table")
        draws = rng(4)
        for score in (
            lambda *about: area(deletion_curve(*about)),
            lambda *about: area(insertion_curve(*about)),
            *(comprehensiveness, sufficiency, selectivity),
        ):
            of_orders = [score(predict, x, draws.random((4, 7))) for _ in range(300)]
            found = score(predict, x, np.ones((4, 7)))
            expected, spread = np.mean(of_orders, axis=0), np.std(of_orders, axis=0)
            assert (np.abs(found - expected) <= spread + 1e-9).all()


class TestRegions:
    """Selectivity and monotonicity."""

    def test_selectivity_in_slow_loops(self) -> None:
        x, relevance = inputs("image"), relevances("image")
        maps = relevance.reshape(4, 3, 5)
        corners = [(r, c) for r in (0, 2) for c in (0, 2, 4)]
        for i in range(4):
            sums = [maps[i, r : r + 2, c : c + 2].sum() for r, c in corners]
            row, curve = x[i : i + 1].clone(), [asked(x[i : i + 1], i)]
            for k in np.argsort(np.negative(sums)):
                r, c = corners[k]
                row[:, :, r : r + 2, c : c + 2] = 0
                curve.append(asked(row, i))
            found = selectivity(predict, x, relevance, side=2)[i]
            assert found == pytest.approx(np.trapezoid(curve, dx=1 / 6))

    @pytest.mark.parametrize("kind", ["table", "series", "documents"])
    def test_selectivity_of_parts_is_the_finest_deletion(self, kind: str) -> None:
        x, relevance = inputs(kind), relevances(kind)
        fine = area(deletion_curve(predict, x, relevance, present(x).shape[1]))
        np.testing.assert_allclose(selectivity(predict, x, relevance, 3), fine)

    @pytest.mark.parametrize("kind", KINDS)
    def test_monotonicity_in_slow_loops(self, kind: str) -> None:
        x, relevance = inputs(kind), relevances(kind)
        found = monotonicity(predict, x, relevance)
        for i, row in enumerate(relevance):
            parts = range(LENGTHS[i] if kind == "documents" else len(row))
            changes = [
                (asked(slowly_without(x[i : i + 1], [p]), i) - asked(x[i : i + 1], i)) ** 2
                for p in parts
            ]
            if len(parts) < 2:
                assert np.isnan(found[i])
            else:
                expected = spearmanr(np.abs(row[: len(parts)]), changes).statistic
                assert found[i] == pytest.approx(expected)
        level = monotonicity(predict, x, np.ones_like(relevance))
        assert (level[~np.isnan(found)] == 0).all()


class TestRoad:
    def test_pixels_are_means_of_those_around_them(self) -> None:
        """Also of the imputed ones; those outside count for nothing."""
        image, gone = rng().random((3, 6, 5)), rng(1).random((6, 5)) < 0.5
        found = imputed(image, gone)
        np.testing.assert_array_equal(found[:, ~gone], image[:, ~gone])
        around = np.array([[1, 2, 1], [2, 0, 2], [1, 2, 1]])
        weights = convolve2d(np.ones((6, 5)), around, "same")
        for channel in found:
            means = convolve2d(channel, around, "same") / weights
            np.testing.assert_allclose(channel[gone], means[gone], atol=1e-12)
        np.testing.assert_array_equal(imputed(image, np.zeros((6, 5), bool)), image)

    def test_is_the_mean_over_shares(self) -> None:
        x, relevance = inputs("image"), relevances("image")
        noise = 0.3 * rng(9).standard_normal(x.shape)
        found = road(predict, x, relevance, (0.2, 0.5), 0.3, rng(9))
        for i, row in enumerate(relevance):
            values = []
            for share in (0.2, 0.5):
                most = np.argsort(-row)[: math.ceil(round(15 * share, 9))]
                gone = np.isin(np.arange(15), most).reshape(3, 5)
                image = imputed(x[i].double().numpy(), gone) + noise[i] * gone
                values.append(asked(torch.from_numpy(image[None]).float(), i))
            assert found[i] == pytest.approx(np.mean(values))


@pytest.mark.parametrize("kind", SHAPES)
def test_infidelity_as_captum(kind: str) -> None:
    x, own = inputs(kind).double(), rng(3)

    def value(x: Tensor) -> Tensor:
        rows = x.flatten(1)
        return torch.sin(rows * torch.arange(1, rows.shape[1] + 1)).sum(dim=1)

    def noisy(x: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.from_numpy(0.2 * own.standard_normal(x.shape))
        return noise, x - noise

    (slopes,) = torch.autograd.grad(value(x.requires_grad_()).sum(), x)
    x = x.detach()
    more = {"n_perturb_samples": 6, "max_examples_per_batch": len(x)}
    expected = metrics.infidelity(value, noisy, x, slopes, **more, normalize=True)
    for scale in (1, -3, 1e-3):  # which does not matter
        found = infidelity(value, x, scale * slopes, 0.2, 6, rng(3))
        np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert found.dtype == np.float64
    assert (found < infidelity(value, x, torch.zeros_like(x), 0.2, 6, rng(3))).all()


class TestSmallChanges:
    @pytest.mark.parametrize("kind", SHAPES)
    def test_sensitivity_written_out(self, kind: str) -> None:
        """Φ = x²: the largest ‖Φ(x + δ) − Φ(x)‖ by ‖Φ(x)‖; of zeros, the former itself."""
        x = inputs(kind).double()
        x[2] = 0
        draws = rng(5)
        deltas = [torch.from_numpy(draws.uniform(-0.1, 0.1, x.shape)) for _ in range(8)]
        changes = [((x + delta) ** 2 - x**2).flatten(1).norm(dim=1) for delta in deltas]
        norm = (x**2).flatten(1).norm(dim=1)
        norm[2] = 1
        found = sensitivity(torch.square, x, 0.1, 8, rng(5))
        np.testing.assert_allclose(found, np.max(changes, axis=0) / norm)


def test_no_gradient_is_kept() -> None:
    """Networks are asked without one, so they may be asked about many inputs."""
    network = nn.Linear(7, 1)

    def value(x: Tensor) -> Tensor:
        found: Tensor = network(x)[:, 0]
        assert not found.requires_grad
        return found

    x = inputs("table")
    ask: Predict = value
    deletion_curve(ask, x, by_part(x), 2)
    comprehensiveness(ask, x, by_part(x))
    infidelity(ask, x, x, 0.1, 2, rng())
