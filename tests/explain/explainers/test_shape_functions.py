"""Shape functions of additive models, against the network's own outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from experiments import Say, ran
from fedsim import Run, explanations
from fedsim.analysis.replay import ModelSnapshot
from fedsim.data import Dataset
from fedsim.explain.explainers.shape_functions import POINTS, ShapeFunctions, Shapes
from fedsim.explain.inputs import Inputs
from fedsim.explain.pictures.shapes import Axis, draw_shapes
from fedsim.testing import check_explainer

RNG = np.random.default_rng(0)
N = 240


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ages, doses with blanks, wards, grades, days, two outcomes and a number."""
    path = tmp_path_factory.mktemp("table") / "wards.csv"
    age, ward = RNG.integers(20, 80, N), RNG.choice(["east", "north", "west"], N)
    score = (age - 50) / 10 + (ward == "north") * 2 + 0.5 * RNG.normal(size=N)
    table = {
        **{"age": age, "dose": np.where(RNG.random(N) < 0.2, np.nan, RNG.uniform(0.5, 2, N))},
        **{"ward": ward, "grade": RNG.choice(["low", "mid", "high"], N)},
        "day": pd.Timestamp("2024-01-01") + pd.to_timedelta(RNG.integers(0, 300, N), "D"),
        **{"sick": np.where(score < 1, "no", "yes"), "kind": np.digitize(score, [-1, 2])},
        "cost": 100 + 20 * score,
    }
    pd.DataFrame(table).to_csv(path, index=False, float_format="%.6f")
    return path


TARGETS: dict[str, dict[str, Any]] = {
    "two": {"label": "sick"},
    "three": {"label": "kind"},
    "number": {"target": "cost"},
}


@pytest.fixture(params=TARGETS)
def done(request: pytest.FixtureRequest, table: Path) -> Run:
    return learnt(table, request.param)


def learnt(table: Path, target: str, **sections: Any) -> Run:
    return ran(
        **{
            "data": {
                **{"name": "table", "path": str(table), **TARGETS[target], "scale": "standard"},
                **{"missing": "mean", "indicator": True, "units": {"age": "years"}},
                "features": ["age", "dose", "ward", "grade", "day"],
                "categorical": {"grade": ["low", "mid", "high"]},
            },
            "partition": {"kind": "iid", "clients": 3},
            "model": {"name": "nam", "hidden": [8, 4]},
            "train": {"rounds": 3, "batch_size": 16, "optimizer": {"name": "adam", "lr": 0.01}},
            **sections,
        }
    )


def explained(of: Run) -> tuple[ModelSnapshot, Dataset, Shapes]:
    snapshot = ModelSnapshot.of(of)
    inputs = Inputs.of_rows(snapshot.dataset, [0, 1, 2, 3])
    found = snapshot.explain(ShapeFunctions(), inputs)
    return snapshot, snapshot.dataset, found


def scores(snapshot: ModelSnapshot, raw: Any) -> Any:
    """(n, C) what relevances sum to, with the mean, in the network's units."""
    with torch.no_grad():
        z = snapshot.network()(snapshot.data().prepare(raw)).double().numpy()
    if z.shape[1] == 1:
        return z
    others = (z.sum(axis=1, keepdims=True) - z) / (z.shape[1] - 1)
    return z - others


class TestValues:
    def test_they_sum_to_the_score(self, done: Run) -> None:
        snapshot, data, found = explained(done)
        train = data.x[snapshot.again.splits.train.values]
        x = snapshot.data().prepare(data.test_x[:8])
        expected = scores(snapshot, data.test_x[:8])
        mean = scores(snapshot, train).mean(axis=0)
        for c in range(expected.shape[1]):
            y, rng = torch.full((8,), c), np.random.default_rng(0)
            own = ShapeFunctions().relevances(snapshot.explained(), snapshot.data(), x, y, rng)
            assert own.shape == (8, 5)
            np.testing.assert_allclose(own.sum(axis=1) + mean[c], expected[:, c], atol=2e-6)
        base = mean[-len(found.of) :]
        if not data.classes:
            base = data.target_scaling.undo(base)
        np.testing.assert_allclose(
            found.base, base, atol=1e-4 if data.target_scaling.span > 1 else 1e-6
        )

    def test_curves_are_what_features_add_at_these_values(self, done: Run) -> None:
        """At the training examples; over all of them a function is 0 on average."""
        snapshot, data, found = explained(done)
        train = data.x[snapshot.again.splits.train.values]
        network = snapshot.network()
        with torch.no_grad():
            added = network.contributions(snapshot.data().prepare(train)).numpy()
        if data.classes:
            C = added.shape[2]
            added = (added - added.mean(axis=2, keepdims=True)) * C / (C - 1)
        added = (added - added.mean(axis=0))[:, :, -len(found.of) :]
        added = added * data.target_scaling.span
        blank = np.zeros(5, np.bool_)
        for f, axis in enumerate(found.axes):
            assert axis.share.sum() == pytest.approx(1)
            if f in (1, 4):  # of numbers between two points
                continue
            for row, own in zip(train[:40], added[:40, f], strict=True):
                told = data.shown(row, blank)[f].partition(" = ")[2]
                p = axis.words.index(told)
                np.testing.assert_allclose(
                    found.values[p, f], own, atol=1e-5 * np.abs(added).max()
                )

    def test_values_have_words_and_shares(self, done: Run) -> None:
        _, data, found = explained(done)
        names = [axis.name for axis in found.axes]
        assert names == ["age (years)", "dose", "ward", "grade", "day"]
        age, dose, ward, grade, day = found.axes
        assert ward.words == ("east", "north", "west")
        assert grade.words == ("low", "mid", "high")
        assert ward.at is grade.at is None
        assert age.words[0] == f"{age.values.min():g} years"
        assert len(dose.words) == POINTS + 1
        assert dose.words[-1] == "(blank)"
        assert np.isnan(dose.at[-1])
        assert 0.1 < dose.share[-1] < 0.3
        assert len(dose.values) == round((1 - dose.share[-1]) * len(age.values))
        assert day.dated
        assert day.words[0].startswith("2024-01-")
        assert data.classes == () or found.of == data.classes[-len(found.of) :]


def test_text_rows_and_pictures(done: Run, tmp_path: Path) -> None:
    _, data, found = explained(done)
    text = found.text()
    about = {0: "cost", 2: "log-odds of yes", 3: "logit less the others' mean"}[len(data.classes)]
    assert text.startswith(f"the global model after round 3: {about} = ")
    order = sorted(range(5), key=lambda f: -found.importance[f].max())
    lines = [line for line in text.split("\n") if " east " in line and " = " not in line]
    assert len(lines) == len(found.of)
    assert all(" north " in line and " west " in line for line in lines)
    assert "\nrow 0: predicted " in text
    rows = found.rows()
    assert rows[0]["feature"] == data.features[order[0]]
    assert len(rows) == len(found.of) * sum(len(axis.words) for axis in found.axes)
    of_ward = [row for row in rows if row["feature"] == "ward" and row["of"] == found.of[0]]
    assert [row["value"] for row in of_ward] == ["east", "north", "west"]
    assert [row["score"] for row in of_ward] == found.values[:3, 2, 0].tolist()
    names = [path.name for path in found.save(tmp_path)]
    assert names == ["shape_functions-round-3.png", "shape_functions-round-3-rows-0-1-2-3.png"]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_clients_over_one_another(table: Path, say: Say) -> None:
    done = learnt(table, "two")
    check_explainer(ShapeFunctions(), done)
    check_explainer(ShapeFunctions(), done, client=1)
    found = explanations(done, client=[0, 2], row=1)
    titles = [f"client {k}'s model after round 3" for k in (0, 2)]
    for own, other, each in zip(titles, titles[::-1], found, strict=True):
        assert each.title == own
        assert [*each.others] == ["global model", other]
        assert each.local.compared.shape == (2, 5)
    one, two = found
    np.testing.assert_array_equal(one.others[titles[1]], two.values)
    assert not np.array_equal(one.values, two.values)
    (of_global,) = explanations(done)
    np.testing.assert_array_equal(one.others["global model"], of_global.values)
    text = say.printed("explain", str(done.path), "--most", "2")  # without inputs, by default
    assert "\n… and 3 more; --most shows more" in text
    assert "row" not in text.partition("written: ")[0]


def test_runs_score_them(table: Path) -> None:
    explain = {"explainers": ["shape_functions", "random"], "inputs": 8, "every": 3, "maps": True}
    done = learnt(table, "two", explain=explain)
    last = done.rounds.iloc[-1]
    assert last["shape_functions/insertion"] > last["random/insertion"]
    assert -1 <= last["shape_functions/client_agreement_rank"] <= 1
    maps = done.maps[done.maps["explainer"] == "shape_functions"]
    assert {len(relevance) for relevance in maps["relevance"]} == {5}
    usual = learnt(table, "two", explain={"inputs": 2})
    assert {*usual.explanations["explainer"]} == {"shape_functions", "random"}


@pytest.mark.parametrize("features", [2, 45])
def test_vectors_without_names(features: int, tmp_path: Path) -> None:
    done = ran(
        data={"name": "synthetic", "samples": 60, "shape": [features], "classes": 3},
        partition={"kind": "iid", "clients": 3},
        model={"name": "nam", "hidden": [3]},
        train={"rounds": 1},
    )
    (found,) = explanations(done)
    assert [axis.name for axis in found.axes[:2]] == ["x1", "x2"]
    (path,) = found.save(tmp_path)
    assert path.stat().st_size > 0


def test_values_that_are_not_finite_are_left_out() -> None:
    axis = Axis("x", ("0", "1"), np.array([0.0, 1.0]), np.array([0.5, 0.5]), np.array([0.0, 1.0]))
    for values in ([np.nan, np.inf], [1.0, np.nan]):
        figure = draw_shapes([axis], {"model": [np.array(values)[:, None]]}, ["y"])
        assert all(map(np.isfinite, figure.axes[0].get_ylim()))
