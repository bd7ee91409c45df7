"""What concepts add to decisions, against the network's own outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments import Finish
from fedsim import Dataset, Run, explanations
from fedsim.analysis.replay import ModelSnapshot
from fedsim.explain.explainers.concepts import ConceptContributions, DecisionsByConcepts
from fedsim.explain.inputs import Inputs
from fedsim.testing import check_explainer

N = 60


def learnt(finish: Finish, classes: int, of: str = "mlp") -> Run:
    """A model of a table with a binary concept, a number, and one that is not known of row 1."""
    rng = np.random.default_rng(classes)
    x, test_x = rng.normal(size=(2, N, 4)).astype(np.float32)
    columns, test_columns = (
        {
            "fever": (own[:, 0] > 0).astype(float),
            "age": 50 + 9.0 * own[:, 1],
            "cough": np.where(np.arange(N) == 1, np.nan, (own[:, 2] > 0).astype(float)),
        }
        for own in (x, test_x)
    )
    names = tuple("abc"[:classes])
    y, test_y = rng.integers(0, max(classes, 1), (2, N)) if classes else x[:, :2].T * 7.0
    further: dict[str, Any] = {"columns": columns, "test_columns": test_columns}
    data = Dataset(x, y, test_x, test_y, names, **further, concepts=tuple(columns))
    model = {"name": "concept_bottleneck", "network": {"name": of}}
    partition = {"kind": "iid", "clients": 3}
    return finish(data=data, model=model, partition=partition, train={"rounds": 2})


def explained(done: Run, rows: tuple[int, ...]) -> tuple[ModelSnapshot, DecisionsByConcepts]:
    snapshot = ModelSnapshot.of(done)
    inputs = Inputs.of_rows(snapshot.dataset, rows)
    found = ConceptContributions().explain(
        snapshot.explained(), snapshot.data(), inputs, np.random.default_rng(0)
    )
    return snapshot, found


@pytest.mark.parametrize("classes", [2, 3, 0])
def test_contributions_sum_to_the_score_of_the_decision(finish: Finish, classes: int) -> None:
    snapshot, found = explained(learnt(finish, classes), (0, 1, 5, 9))
    x = torch.from_numpy(np.asarray(snapshot.dataset.test_x[[0, 1, 5, 9]]))
    with torch.no_grad():
        outputs = snapshot.network()(x).double()
    expected = outputs[:, 0]
    if classes:
        own, decided = outputs.max(dim=1)
        expected = own - (outputs.sum(dim=1) - own) / (classes - 1)
        assert found.decisions == tuple(snapshot.dataset.classes[c] for c in decided)
    else:
        assert [*map(float, found.decisions)] == pytest.approx(expected.tolist(), rel=1e-5)
    sums = found.adds.sum(axis=1) + found.base
    np.testing.assert_allclose(sums, expected.numpy(), rtol=0, atol=1e-5)


def test_what_true_concepts_would_add(finish: Finish) -> None:
    snapshot, found = explained(learnt(finish, 3), (0, 1, 2))
    assert np.isnan(found.would).tolist() == [[False] * 3, [False, False, True], [False] * 3]
    network: Any = snapshot.network()
    W, b = (p.detach().double().numpy() for p in (network.head.weight, network.head.bias))
    age = snapshot.dataset.columns["age"]
    for k, row in enumerate((0, 1, 2)):
        columns = snapshot.dataset.test_columns
        true = [columns["fever"][row], (columns["age"][row] - age.mean()) / age.std()]
        true.append(columns["cough"][row] if row != 1 else found.predicted[k, 2])
        outputs = W @ np.array(true) + b
        assert found.intervened[k] == snapshot.dataset.classes[int(outputs.argmax())]
        c = snapshot.dataset.classes.index(found.decisions[k])
        w = W[c] - np.delete(W, c, axis=0).mean(axis=0)
        np.testing.assert_allclose(found.would[k, :2], w[:2] * true[:2], atol=1e-6)
    rows = found.rows()
    assert len(rows) == 9
    by_name = {(row["input"], row["concept"]): row for row in rows}
    assert by_name["row 1", "cough"]["true"] is None
    in_years = by_name["row 0", "age"]["true"]
    assert in_years == pytest.approx(snapshot.dataset.test_columns["age"][0], rel=1e-5)


def test_it_is_told_and_drawn(finish: Finish, tmp_path: Path) -> None:
    done = learnt(finish, 2)
    check_explainer(ConceptContributions(), done)
    shown = explanations(done, row=[0, 1])  # the model's usual explainer
    (found,) = shown
    text = found.text()
    assert "log-odds of the decision" in text
    assert "with true concepts" in text
    assert text.count("; with its true value") == 5
    assert [path.name for path in found.save(tmp_path)] == ["concepts-round-2-rows-0-1.png"]


def test_inputs_of_files_have_no_true_concepts(finish: Finish, tmp_path: Path) -> None:
    np.save(tmp_path / "own.npy", np.zeros((2, 4), np.float32))
    done = learnt(finish, 2)
    (found,) = explanations(done, input=tmp_path / "own.npy")
    assert "true" not in found.text()
    assert found.rows()[0]["intervened"] is None
    assert found.save(tmp_path)
