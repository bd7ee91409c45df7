"""Concept bottlenecks, against their losses and scores written out."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from experiments import Finish
from fedsim import Dataset
from fedsim.data import datasets, load_dataset
from fedsim.models import models
from fedsim.models.concept_bottleneck import ConceptClassifier
from fedsim.objectives import Batch, ConceptRegression, Concepts, evaluate, merged, scores_of

N = 40
BINARY = torch.tensor([True, True, False])  # two binary concepts and a number
SHAPES: dict[str, Any] = {
    "data": {"name": "shapes", "samples": 240, "test_samples": 60},
    "partition": {"kind": "iid", "clients": 4, "test_fraction": 0.2},
    "model": {"name": "concept_bottleneck", "network": {"name": "mlp", "hidden": [12]}},
    "train": {"rounds": 2, "optimizer": {"lr": 0.05}},
}


def table(classes: int = 3, unknown: bool = True, seed: int = 0) -> Dataset:
    rng = np.random.default_rng(seed)
    x, test_x = rng.normal(size=(2, N, 5)).astype(np.float32)
    columns, test_columns = (
        {
            "fever": (of[:, 0] > 0).astype(float),
            "cough": (of[:, 1] > 0).astype(float),
            "age": 50 + 9 * of[:, 2].astype(float),
        }
        for of in (x, test_x)
    )
    if unknown:
        for own in (columns, test_columns):
            own["cough"][::3] = own["age"][1::4] = np.nan
    y = rng.integers(0, classes, (2, N)) if classes else rng.normal(size=(2, N)).astype(np.float32)
    names = tuple("abc"[:classes])
    further = {"columns": columns, "test_columns": test_columns, "concepts": tuple(columns)}
    return Dataset(x, y[0], test_x, y[1], names, **further)  # type: ignore[arg-type]


def learner(data: Dataset, **fields: Any) -> tuple[Any, Any, Batch]:
    """A network, its objective, and the test examples."""
    torch.manual_seed(0)
    model = models.parse(
        {"name": "concept_bottleneck", "network": {"name": "mlp", "hidden": [6]}, **fields}
    )
    objective = model.objective(data)
    objective.check(data)
    objective = objective.fitted(data)
    network = model.build_for(data.spec, objective.num_outputs(data))
    assert isinstance(network, ConceptClassifier)
    facts = objective.facts(data.test_columns, slice(None))
    x, y = torch.from_numpy(np.asarray(data.test_x)), torch.from_numpy(data.test_y)
    return network, objective, Batch(x, y, facts={"concepts": torch.from_numpy(facts["concepts"])})


def true_of(data: Dataset) -> Tensor:
    """(N, J) the true concepts of test examples; numbers are scaled by training examples."""
    age = data.columns["age"]
    scaled = (data.test_columns["age"] - np.nanmean(age)) / np.nanstd(age)
    both = [data.test_columns["fever"], data.test_columns["cough"], scaled]
    return torch.from_numpy(np.stack(both, axis=1)).float()


def of_concepts(raw: Tensor, true: Tensor) -> Tensor:
    """(N,) the loss of those concepts that are known."""
    known, wanted = ~true.isnan(), true.nan_to_num()
    entropy = functional.binary_cross_entropy_with_logits(raw, wanted, reduction="none")
    return (torch.where(BINARY, entropy, (raw - wanted).square()) * known).sum(dim=1)


@pytest.mark.parametrize("classes", [3, 0])
@pytest.mark.parametrize("learning", ["joint", "sequential", "independent"])
@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_the_loss_is_its_formula(learning: str, weight: float, classes: int) -> None:
    data = table(classes)
    network, objective, batch = learner(data, learning=learning, weight=weight)
    true = true_of(data)
    losses = objective.loss(network, batch.x, batch.y, batch.facts)
    raw = network.features.network(batch.x)
    c = torch.where(BINARY, raw.sigmoid(), raw)
    if learning == "independent":
        c = torch.where(true.isnan(), c, true)
    outputs = network.head(c)
    if classes:
        task = functional.cross_entropy(outputs, batch.y, reduction="none")
    else:
        task = (outputs[:, 0] - batch.y).square()
    expected = task + weight * of_concepts(raw, true)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


def test_what_g_and_f_learn_from() -> None:
    """Of the label, g learns if they learn jointly; f learns it from what it gets."""
    data, found = table(), {}
    for learning in ("joint", "sequential", "independent"):
        network, objective, batch = learner(data, learning=learning, weight=0.5)
        objective.loss(network, batch.x, batch.y, batch.facts).mean().backward()
        found[learning] = [p.grad.clone() for p in network.parameters()]
    network, _, batch = learner(data, weight=0.5)
    (0.5 * of_concepts(network.features.raw(batch.x), true_of(data)).mean()).backward()
    alone = [p.grad for p in network.features.parameters()]
    for learning in ("sequential", "independent"):
        for grad, expected in zip(found[learning], alone, strict=False):
            torch.testing.assert_close(grad, expected)
    heads = {learning: grads[-2] for learning, grads in found.items()}
    torch.testing.assert_close(heads["joint"], heads["sequential"])
    assert not torch.allclose(heads["joint"], heads["independent"])
    assert not torch.allclose(found["joint"][0], found["sequential"][0])


@pytest.mark.parametrize("classes", [3, 2, 0])
def test_contributions_sum_to_the_outputs(classes: int) -> None:
    network, _, batch = learner(table(classes))
    concepts = network.features(batch.x)
    sums = network.contributions(concepts).sum(dim=1) + network.head.bias.double()
    torch.testing.assert_close(sums.float(), network(batch.x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("classes", [3, 0])
def test_scores_are_those_by_hand(classes: int) -> None:
    data = table(classes)
    network, objective, batch = learner(data)
    network.eval()
    scores = scores_of(objective, evaluate(objective, network, batch))
    with torch.no_grad():
        c, true = network.features(batch.x), true_of(data)
        known = ~true.isnan()
        right = ((c > 0.5) == (true > 0.5))[:, BINARY][known[:, BINARY]]
        error = (c - true)[:, 2][known[:, 2]].abs().mean()
        intervened = network.head(torch.where(known, true, c))
    assert scores["concept_accuracy"] == pytest.approx(float(right.float().mean()))
    assert scores["concept_error"] == pytest.approx(float(error), rel=1e-5)
    if classes:
        accuracy = (intervened.argmax(dim=1) == batch.y).float().mean()
        assert scores["intervened_accuracy"] == pytest.approx(float(accuracy))
    else:
        squared = float((intervened[:, 0] - batch.y).square().mean())
        assert scores["intervened_loss"] == pytest.approx(squared, rel=1e-5)
    parts = [evaluate(objective, network, batch.at(slice(k, k + 7))) for k in range(0, N, 7)]
    assert scores_of(objective, merged(parts)) == pytest.approx(scores, rel=1e-5)
    for metric in objective.metrics(data):
        assert metric.column in scores


def test_concepts_that_nobody_knows_have_no_score() -> None:
    data = table()
    blank = {name: np.full(N, np.nan) for name in data.test_columns}
    network, objective, batch = learner(replace(data, test_columns=blank))
    scores = scores_of(objective, evaluate(objective, network, batch))
    assert np.isnan([scores["concept_accuracy"], scores["concept_error"]]).all()
    assert scores["intervened_accuracy"] == scores["accuracy"]
    losses = objective.loss(network, batch.x, batch.y, batch.facts)
    plain = functional.cross_entropy(network(batch.x), batch.y, reduction="none")
    torch.testing.assert_close(losses, plain)


def test_the_objective_is_that_of_the_labels() -> None:
    model = models.parse({"name": "concept_bottleneck"})
    assert isinstance(model.objective(table(3)), Concepts)
    assert isinstance(model.objective(table(0)), ConceptRegression)


def test_parts_of_batches_come_to_the_same(finish: Finish) -> None:
    whole, parts = (
        finish(**{**SHAPES, "train": {**SHAPES["train"], "accumulate": n}}) for n in (1, 4)
    )
    for layer, tensor in whole.weights().items():
        torch.testing.assert_close(parts.weights()[layer], tensor, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "sections",
    [
        {"evaluate": {"validation": 0.2, "conformal": {}, "metrics": ["macro_f1"]}},
        {"explain": {"inputs": 3}},
        {"adapters": {"r": 2}},
    ],
    ids=lambda sections: next(iter(sections)),
)
def test_it_meets_other_sections(finish: Finish, sections: dict[str, Any]) -> None:
    done = finish(**SHAPES, **sections)
    assert (
        done.rounds[["concept_accuracy", "concept_error", "intervened_accuracy"]]
        .notna()
        .all(axis=None)
    )


def test_clients_own_test_examples_have_their_concepts(finish: Finish) -> None:
    done = finish(**SHAPES, method={"name": "fedper"}, evaluate={"clients": True})
    own = done.clients[["test_concept_accuracy", "test_intervened_accuracy"]]
    assert own.notna().to_numpy().any()
    assert own.stack().between(0, 1).all()  # type: ignore[operator]


def test_other_models_do_not_see_concepts(finish: Finish) -> None:
    data = load_dataset(datasets.parse(SHAPES["data"]))
    bare = replace(data, concepts=())
    sections = {"partition": SHAPES["partition"], "model": {"name": "mlp"}, "train": {"rounds": 1}}
    runs = [finish(data=given, **sections) for given in (data, bare)]
    for layer, tensor in runs[0].weights().items():
        assert torch.equal(tensor, runs[1].weights()[layer])


def test_labels_of_shapes_follow_from_their_concepts() -> None:
    data = load_dataset(datasets.parse({"name": "shapes", "samples": 2000}))
    for columns, y in ((data.columns, data.y), (data.test_columns, data.test_y)):
        c = {name: columns[name] for name in data.concepts}
        score = c["square"] + c["ring"] - c["stripe"] + 2 * c["brightness"]
        assert ((score > 1.25) == y).all()
    assert abs(data.y.mean() - 0.59) < 0.03
    plain = load_dataset(datasets.parse({"name": "shapes", "noise": 0.0}))
    background = np.median(plain.x, axis=(1, 2, 3))
    np.testing.assert_allclose(background, plain.columns["brightness"] / 2, atol=1e-6)
    framed = plain.x[:, 0, 0, 0] > background + 0.4
    assert (framed == plain.columns["frame"]).all()


def test_concepts_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "patients.csv"
    lines = ["age,fever,cough,weight,sick"]
    for i in range(20):
        cough = ["true", "false", ""][i % 3]
        lines.append(f"{20 + i},{i % 2},{cough},{-999 if i == 4 else 60 + i},{'ab'[i % 2]}")
    path.write_text("\n".join(lines))
    section = {"name": "table", "path": path, "label": "sick"}
    section |= {"concepts": ["fever", "cough", "weight"], "blanks": [-999]}
    data = load_dataset(datasets.parse(section))
    assert data.features == ("age",)
    assert [c.binary for c in data.spec.concepts] == [True, True, False]
    rows = np.round(data.x[:, 0]).astype(int) - 20
    np.testing.assert_array_equal(data.columns["fever"], rows % 2)
    expected = np.array([1, 0, np.nan])[rows % 3]
    np.testing.assert_array_equal(data.columns["cough"], expected)
    np.testing.assert_array_equal(data.columns["weight"], np.where(rows == 4, np.nan, 60.0 + rows))
    test = np.round(data.test_x[:, 0]).astype(int) - 20
    np.testing.assert_array_equal(data.test_columns["fever"], test % 2)
    kept = load_dataset(datasets.parse({**section, "missing": "drop"}))
    assert len(kept.y) == len(data.y)  # an unknown concept is no reason to leave out a row
    others = shutil.copy(path, tmp_path / "others.csv")
    apart = load_dataset(datasets.parse({**section, "test_path": others}))
    assert len(apart.test_columns["weight"]) == len(apart.test_y) == 20


def test_subsets_keep_the_concepts_of_their_examples(finish: Finish) -> None:
    whole = load_dataset(datasets.parse({"name": "shapes", "samples": 100}))
    some = load_dataset(
        datasets.parse({"name": "shapes", "samples": 100, "subset": 30, "test_subset": 20})
    )
    places = {row.tobytes(): i for i, row in enumerate(whole.x)}
    at = [places[row.tobytes()] for row in some.x]
    np.testing.assert_array_equal(some.columns["ring"], whole.columns["ring"][at])
    assert len(some.test_columns["ring"]) == 20
    model = SHAPES["model"]
    done = finish(data=some, partition={"kind": "iid", "clients": 2}, model=model)
    assert "concept_accuracy" in done.rounds
