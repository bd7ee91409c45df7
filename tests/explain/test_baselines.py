"""Baselines and backgrounds: what they are, what they cost, and what is refused."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from experiments import ran, small_experiment
from fedsim.data import ClientSplits, Dataset
from fedsim.data.splits import Ragged
from fedsim.errors import FedsimWarning
from fedsim.explain import ExplainedData, ExplainedModel
from fedsim.explain.baselines import (
    Background,
    Baseline,
    Clients,
    Compared,
    Pooled,
    Reference,
    Rows,
    TrainingRows,
    blurred,
    centres,
    label,
    merged,
    rows_of,
    sent_centres,
)
from fedsim.explain.explainers import explainers
from fedsim.explain.explainers.gradients import GradientXInput, IntegratedGradients
from fedsim.explain.explainers.occlusion import Occlusion
from fedsim.explain.explainers.sage import Sage
from fedsim.launch.prepare import prepare
from fedsim.models import models
from fedsim.support.rng import keyed_rng

EVERY: tuple[Any, ...] = (
    *("zero", "mean", "median", "blur", "noise"),
    *({"reference": 2}, {"train": 3}, {"clients": 2}),
)
COMPARED = (IntegratedGradients, GradientXInput, Occlusion, Sage)
OF_CAPTUM = ("IntegratedGradients", "DeepLift", "DeepLiftShap", "FeatureAblation")
WEIGHED: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in ("integrated_gradients", "gradient_x_input", "occlusion")},
    **{name: {"name": name} for name in ("sage", "kernel_shap", "deep_shap")},
    "gradient_shap": {"name": "gradient_shap", "samples": 4000},
    **{method: {"name": "captum", "method": method} for method in OF_CAPTUM},
}
PARTS = ([0, 3, 4, 9], [1, 2], [5, 6, 7, 8, 10, 11])


def subject(shape: tuple[int, ...] = (1, 5, 6), n: int = 12) -> tuple[ExplainedModel, Any]:
    """A network and data, dealt out to three clients."""
    rng = np.random.default_rng(0)
    x = rng.normal(1, 2, (n, *shape)).astype(np.float32)
    data = Dataset(x, np.arange(n) % 3, x[:4] + 1, np.arange(4) % 3, ("a", "b", "c"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            *(torch.nn.Flatten(), torch.nn.Linear(math.prod(shape), 8), torch.nn.Tanh()),
            torch.nn.Linear(8, 3),
        )
    none = Ragged.of([[]] * 3)
    splits = ClientSplits(Ragged.of([np.array(part) for part in PARTS]), none, none)
    model = ExplainedModel(models.parse({"name": "mlp"}), "", 1, 7, network=net.eval())
    return model, ExplainedData(data, torch.from_numpy, splits=splits)


def made(kind: type[Compared], baseline: Any) -> Any:
    return kind.model_validate({"baseline": baseline})


class TestRows:
    """Each baseline by its definition."""

    def rows(self, choice: Baseline, **changed: Any) -> NDArray[Any]:
        model, data = subject()
        return rows_of(choice, model, replace(data, **changed)).inputs

    def test_of_all(self) -> None:
        _, data = subject()
        x = data.dataset.x
        np.testing.assert_allclose(self.rows("mean")[0], x.mean(axis=0), rtol=1e-6)
        np.testing.assert_array_equal(self.rows("median")[0], np.median(x, axis=0))
        np.testing.assert_array_equal(self.rows(Reference(reference=2)), data.dataset.test_x[2:3])
        noise = self.rows("noise")[0]
        assert ((noise >= x.min(axis=0)) & (noise <= x.max(axis=0))).all()
        assert np.array_equal(noise, self.rows("noise")[0])
        for kind in (Clients, Pooled):  # one centre is the mean
            found = self.rows(kind(clients=1))
            np.testing.assert_allclose(found, self.rows("mean"), rtol=1e-5, atol=1e-6)

    def test_examples_are_the_clients_own_or_everybodys(self) -> None:
        model, data = subject()
        own = data.dataset.x[PARTS[1]]
        found = rows_of(TrainingRows(train=5), replace(model, client=1), replace(data, own=own))
        np.testing.assert_array_equal(found.inputs, own)  # all, because there are fewer
        everybody = self.rows(TrainingRows(train=5))
        assert len(everybody) == 5
        assert all((row == data.dataset.x).all(axis=(1, 2, 3)).any() for row in everybody)

    def test_those_held_out_and_changed_copies_are_no_training_inputs(self) -> None:
        _, data = subject()
        splits = replace(data.splits, train=Ragged.of([np.array([0, 1]), np.array([2])]))
        copies = {"splits": None, "dataset": replace(data.dataset, copies=9)}
        for changed in ({"splits": splits}, copies):
            mean = self.rows("mean", **changed)[0]
            np.testing.assert_allclose(mean, data.dataset.x[:3].mean(axis=0), rtol=1e-6)

    def test_a_blur_keeps_what_is_constant(self) -> None:
        flat = torch.full((2, 3, 7, 4), 5.0)
        torch.testing.assert_close(blurred(flat), flat)
        point = torch.zeros(1, 1, 21, 21)
        point[0, 0, 10, 10] = 1
        spread = blurred(point)[0, 0]
        at = torch.arange(21.0) - 10
        near = torch.exp(-(at**2) / (2 * 2.1**2))  # a tenth of 21
        middle = slice(7, 14)  # weights at the borders are scaled
        expected = (near[:, None] * near)[middle, middle]
        found = (spread / spread.max())[middle, middle]
        torch.testing.assert_close(found, expected, rtol=0.01, atol=0)


class TestCentres:
    def test_planted_clusters_are_found_with_their_weights(self) -> None:
        rng = np.random.default_rng(1)
        planted = np.array([[0.0, 0], [20, 0], [0, 20]])
        of = np.repeat([0, 1, 2], [50, 30, 20])
        x = (planted[of] + rng.normal(size=(100, 2))).astype(np.float32)
        found, weights = centres(x, 3, keyed_rng(0, "it"))
        order = np.argsort(-weights)
        assert weights[order].tolist() == [50, 30, 20]
        expected = np.stack([x[of == k].mean(axis=0) for k in range(3)])
        np.testing.assert_allclose(found[order], expected, rtol=1e-4, atol=1e-4)

    def test_they_do_not_depend_on_the_order_nor_on_how_often_a_row_is_written(self) -> None:
        x = np.random.default_rng(2).normal(size=(40, 3)).astype(np.float32)
        found = centres(x, 4, keyed_rng(0, "it"))
        again = centres(x[::-1], 4, keyed_rng(0, "it"))
        twice = centres(x, 4, keyed_rng(0, "it"), np.full(40, 2.0))
        for a, b in zip(found, again, strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(twice[0], found[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(twice[1], 2 * found[1])

    def test_no_more_than_there_are_different_inputs(self) -> None:
        x = np.array([[1.0], [2], [1], [1]], np.float32)
        found, weights = centres(x, 3, keyed_rng(0, "it"))
        assert (found.tolist(), weights.tolist()) == ([[1.0], [2.0]], [3.0, 1.0])

    def test_clusters_apart_are_merged_to_the_pooled_ones(self) -> None:
        """Each client has two of four clusters; the server finds all four."""
        rng = np.random.default_rng(3)
        planted = np.array([[0, 0], [90, 0], [0, 90], [90, 90]])
        of = np.repeat([0, 1, 1, 2, 2, 3], 20)
        x = (planted[of] + rng.normal(size=(120, 2))).astype(np.float32)
        parts = Ragged.of([np.arange(40), np.arange(40, 80), np.arange(80, 120), []])
        splits = ClientSplits(parts, parts, parts)
        sent = sent_centres(4, 0, x, splits)
        assert len(sent) == 3  # a client without examples sends nothing
        assert [weights.sum() for _, weights in sent] == [40, 40, 40]
        found, weights = merged(sent, 4, 0)
        expected = np.stack([x[of == k].mean(axis=0) for k in range(4)])
        nearest = np.linalg.norm(found[:, None] - expected, axis=2)
        assert sorted(nearest.argmin(axis=1).tolist()) == [0, 1, 2, 3]
        assert nearest.min(axis=1).max() < 1e-3
        assert weights.tolist() == np.bincount(of)[nearest.argmin(axis=1)].tolist()


@pytest.mark.parametrize("kind", COMPARED)
@pytest.mark.parametrize("baseline", EVERY)
def test_a_background_is_averaged_over(kind: type[Compared], baseline: Any) -> None:
    """The mean of the explanations with each of its rows alone, but for a loss (SAGE)."""
    model, data = subject()
    explainer = made(kind, baseline)
    explainer.check(model, data)
    assert explainer.about_baseline(data.dataset)
    x, y = torch.from_numpy(data.dataset.test_x), torch.arange(4) % 3
    found = explainer.relevances(model, data, x, y, np.random.default_rng(0))
    background = explainer.background(model, data, x)
    if explainer.complete:
        end, start = explainer.endpoints(model, data, x, y)
        gap = np.abs(found.reshape(4, -1).sum(axis=1) - (end - start))
        assert (gap <= 0.011 * np.abs(end - start) + 1e-3).all()
    if background is None or kind is Sage or baseline == "blur":
        return
    alone = []
    for _, row in background.each():
        one = replace(data, backgrounds={"mean": Rows.of(row.numpy())})
        alone.append(made(kind, "mean").relevances(model, one, x, y, np.random.default_rng(0)))
    largest = np.abs(found).max()
    mean = np.average(alone, axis=0, weights=background.weights)
    np.testing.assert_allclose(found, mean, rtol=0, atol=0.01 * largest)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_equal_weights_are_none(size: int) -> None:
    """To the bit, in whatever layout values are."""
    values = torch.randn(7, 5, generator=torch.Generator().manual_seed(size)).T[:size]
    ours = Background(torch.zeros(size, 1), np.ones(size)).mean(values)
    assert torch.equal(ours, values.mean(dim=0))
    weights = np.arange(1.0, size + 1)
    weighted = Background(torch.zeros(size, 1), weights / weights.mean()).mean(values)
    expected = np.average(values.numpy(), axis=0, weights=weights)
    np.testing.assert_allclose(weighted, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", WEIGHED)
def test_centres_count_as_much_as_what_is_nearest_to_them(name: str) -> None:
    """A row of weight 3 beside one of weight 1 is as good as the same row three times."""
    model, data = subject()
    explainer = explainers.parse({"baseline": {"clients": 2}, **WEIGHED[name]})
    assert isinstance(explainer, Compared)
    x, y = torch.from_numpy(data.dataset.test_x[:2]), torch.arange(2)
    rows = data.dataset.x[:2]
    found = []
    for background in (Rows.of(rows, np.array([3.0, 1])), Rows.of(rows[[0, 0, 0, 1]])):
        own = replace(data, backgrounds={"clients-2": background})
        found.append(explainer.relevances(model, own, x, y, np.random.default_rng(0)))
        if explainer.complete:
            ends = explainer.endpoints(model, own, x, y)
            found[-1] = np.append(found[-1], np.concatenate(ends).astype(np.float32))
    largest = np.abs(found[1]).max()
    away = 0.05 if name == "gradient_shap" else 1e-5  # which draws
    np.testing.assert_allclose(*found, rtol=0, atol=away * largest)
    own = replace(data, backgrounds={"clients-2": Rows.of(rows)})
    even = explainer.relevances(model, own, x, y, np.random.default_rng(0)).ravel()
    assert np.abs(even - np.ravel(found[0])[: len(even)]).max() > away * largest


def test_names_of_pictures_tell_them_apart() -> None:
    names = {made(Occlusion, baseline).file for baseline in EVERY}
    assert len(names) == len(EVERY)
    assert {"occlusion", "occlusion-baseline-train-3", "occlusion-baseline-row-2"} <= names
    assert Sage().file == "sage"
    assert label(Clients(clients=4)) == "clients-4"


def of_centres(m: int) -> dict[str, Any]:
    explainers = [{"name": "occlusion", "baseline": {"clients": m}}]
    return {"explainers": explainers, "inputs": 3, "of": ["global"]}


class TestRuns:
    def test_what_clients_send_and_how_far_it_leads(self) -> None:
        named = (
            {"name": "gradient_x_input", "baseline": b} for b in ({"clients": 2}, {"train": 2})
        )
        found, plain = (
            ran(train={"rounds": 2}, explain={"explainers": [one, "random"], "inputs": 3})
            for one in named
        )
        clients, width = found.manifest["clients"], 64
        first = found.rounds.iloc[0]
        # Centres of 32-bit floats with their weights, and those of the background to explainers.
        assert first["one_off_up"] == clients * 2 * (4 * width + 8)
        assert first["one_off_down"] == clients * 2 * (4 * width + 8)
        before = plain.rounds.iloc[0]
        assert first["bytes_up"] == before["bytes_up"] + first["one_off_up"]
        assert "one_off_up" not in plain.rounds
        rows = found.explanations
        own = rows[rows["explainer"] == "gradient_x_input"]
        assert own["background_gap"].between(0, 2).all()
        assert rows[rows["explainer"] == "random"]["background_gap"].isna().all()
        assert "background_gap" not in plain.explanations
        assert "gradient_x_input/background_gap" in found.rounds
        assert "random/background_gap" not in found.rounds

        # Nobody receives it if the server alone explains.
        first = ran(explain=of_centres(2), train={"rounds": 1}).rounds.iloc[0]
        assert first["one_off_up"] > 0
        assert first.get("one_off_down", 0) == 0

    def test_what_centres_give_away(self) -> None:
        privacy, masks = {"clip": 1, "noise_multiplier": 1}, {"secure_aggregation": {}}
        for m, sections, line in (
            (2, {"privacy": privacy}, "sent without noise, and privacy does not count them"),
            (2, masks, "sent without masks: the server sees those of each client"),
            (60, {}, "they send the examples themselves"),  # of whom some have fewer
        ):
            with pytest.warns(FedsimWarning, match=f"baseline.clients.*{line}"):
                prepare(small_experiment(explain=of_centres(m), **sections))
        with warnings.catch_warnings():
            warnings.simplefilter("error", FedsimWarning)
            prepare(small_experiment(explain=of_centres(2)))
