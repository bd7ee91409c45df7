"""Scores that ask the model: each against its formula in slow loops, and against Captum's."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable, Sequence
from typing import Any

import captum.metrics
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.errors import ExperimentError
from fedsim.explain.scores import faithfulness
from fedsim.explain.scores.faithfulness import (
    Predict,
    area,
    by_part,
    comprehensiveness,
    deletion_curve,
    infidelity,
    insertion_curve,
    present,
    sensitivity,
    sufficiency,
    without,
)

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


def test_examples_run() -> None:
    found = doctest.testmod(faithfulness)
    assert found.attempted
    assert not found.failed


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

    def test_by_part_adds_up_channels(self) -> None:
        x = inputs("image")
        np.testing.assert_allclose(by_part(x), x.double().sum(dim=1).flatten(1))
        np.testing.assert_array_equal(by_part(x.sum(dim=1)), x.sum(dim=1).flatten(1))
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

    def test_area_is_numpys(self) -> None:
        curve = rng().random((3, 21))
        np.testing.assert_allclose(area(curve), np.trapezoid(curve, dx=1 / 20, axis=1))

    def test_a_share_that_is_whole_is_not_rounded_up(self) -> None:
        """7 of 100, although 0.07 times 100 is a little more."""
        x = torch.ones(1, 100)
        assert comprehensiveness(lambda x: x.sum(dim=1), x, by_part(x), (0.07,)).tolist() == [7]


class Smooth(nn.Module):
    """A value of each input, for all kinds that can be changed a little, in double precision."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(1)
        return torch.sin(rows * torch.arange(1, rows.shape[1] + 1)).sum(dim=1)


def gradient(x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        (found,) = torch.autograd.grad(Smooth()(x).sum(), x)
    return found


@pytest.mark.parametrize("kind", SHAPES)
class TestAsCaptum:
    def test_infidelity(self, kind: str) -> None:
        x = inputs(kind).double()
        slopes = gradient(x)
        own = rng(3)

        def noisy(x: Tensor) -> tuple[Tensor, Tensor]:
            noise = torch.from_numpy(0.2 * own.standard_normal(x.shape))
            return noise, x - noise

        expected = captum.metrics.infidelity(
            *(Smooth(), noisy, x, slopes), n_perturb_samples=6, max_examples_per_batch=len(x), normalize=True
        )
        found = infidelity(Smooth(), x, slopes, 0.2, 6, rng(3))
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, expected, rtol=1e-9)
        for scale in (-3, 1e-3):  # which does not matter
            scaled = infidelity(Smooth(), x, scale * slopes, 0.2, 6, rng(3))
            np.testing.assert_allclose(scaled, expected, rtol=1e-9)
        changes = infidelity(Smooth(), x, torch.zeros_like(x), 0.2, 6, rng(3))
        assert (found < changes).all()

    def test_sensitivity(self, kind: str) -> None:
        x = inputs(kind).double()
        own = rng(3)

        def around(x: Tensor, radius: float) -> Tensor:
            return x + torch.from_numpy(own.uniform(-radius, radius, x.shape))

        def attribute(x: Any) -> tuple[Tensor]:
            """Captum asks about a tuple first, then about tensors, and wants tuples."""
            return (gradient(x[0] if isinstance(x, tuple) else x),)

        expected = captum.metrics.sensitivity_max(
            *(attribute, x, around, 0.1), n_perturb_samples=6, max_examples_per_batch=len(x)
        )
        found = sensitivity(gradient, x, 0.1, 6, rng(3))
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, expected, rtol=1e-9)


class TestSmallChanges:
    def test_sensitivity_written_out(self) -> None:
        """Φ = x: the largest ‖δ‖ by ‖x‖; of zeros, ‖δ‖ itself."""
        x = inputs("table").double()
        x[2] = 0
        draws = rng(5)
        sizes = [np.linalg.norm(draws.uniform(-0.1, 0.1, x.shape), axis=1) for _ in range(8)]
        norm = np.linalg.norm(x, axis=1)
        norm[2] = 1
        found = sensitivity(lambda x: x, x, 0.1, 8, rng(5))
        np.testing.assert_allclose(found, np.max(sizes, axis=0) / norm)

    @pytest.mark.parametrize(
        ("score", "ask"),
        [
            ("infidelity", lambda x: infidelity(predict, x, x.float(), 0.1, 1, rng())),
            ("sensitivity", lambda x: sensitivity(torch.ones_like, x, 0.1, 1, rng())),
        ],
    )
    def test_documents_are_refused(self, score: str, ask: Callable[[Tensor], object]) -> None:
        with pytest.raises(ExperimentError, match=f"^{score}: needs floating-point inputs"):
            ask(inputs("documents"))


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
