"""Scores of chosen words against slow ones, and what CKA is to be."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from snippets import ROOT
from torch import Tensor

from experiments import REVIEWS, federation, server_states, small_experiment
from fedsim import Experiment, run
from fedsim.models import models
from fedsim.models.rationale import RationaleClassifier, encoder_distance
from fedsim.objectives import Batch, Rationales, evaluate
from fedsim.objectives.slices import ByColumn

pytestmark = pytest.mark.filterwarnings("ignore:.*words get random vectors")
linear_cka = run_path(str(ROOT / "experiments" / "fedrnl" / "similarity.py"))["linear_cka"]


def network(seed: int = 0) -> RationaleClassifier:
    torch.manual_seed(seed)
    vectors = torch.randn(20, 5)
    vectors[0] = 0
    model: Any = models.parse({"name": "rationale", "hidden": 4})
    return model.build_text(vectors, torch.arange(20) > 1, 2)


def documents(n: int = 30, length: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(0)
    x = rng.integers(2, 20, (n, length))
    lengths = rng.integers(1, length + 1, n)
    x[np.arange(length) >= lengths[:, None]] = 0
    marks = (rng.random(x.shape) < 0.3) & (x != 0)
    return torch.tensor(x).int(), torch.tensor(rng.integers(0, 2, n)), torch.tensor(marks)


def scores_of(
    made: RationaleClassifier, x: Tensor, y: Tensor, marks: Tensor | None
) -> dict[str, float]:
    facts = {} if marks is None else {"signal": marks}
    return Rationales().scores(evaluate(Rationales(), made, Batch(x, y, facts=facts)))


@torch.no_grad()
def test_scores_are_as_written_out() -> None:
    made, (x, y, marks) = network().eval(), documents()
    found = scores_of(made, x, y, marks)
    z = made.features.select(x).bool()

    def probability(row: int, chosen: Tensor) -> Tensor:
        read = made.features.encode(x[row : row + 1], chosen[row : row + 1].float())
        return made.head(read).softmax(dim=1)[0]

    full, only, rest, right = [], [], [], {0: [], 1: []}
    for k in range(len(x)):
        chosen = probability(k, z)
        c = int(chosen.argmax())
        right[int(y[k])].append(c == int(y[k]))
        only.append(float(chosen[c]))
        full.append(float(probability(k, torch.ones_like(z))[c]))
        rest.append(float(probability(k, ~z)[c]))
    words, hit = int((x != 0).sum()), int((z & marks).sum())
    g, s = int(marks.sum()) / words, int(z.sum()) / words
    precision, recall = hit / int(z.sum()), hit / int(marks.sum())
    expected = {
        "chosen": s,
        "comprehensiveness": np.mean(full) - np.mean(rest),
        "sufficiency": np.mean(full) - np.mean(only),
        "rationale_precision": precision,
        "rationale_recall": recall,
        "rationale_f1": 2 * precision * recall / (precision + recall),
        "chance_f1": 2 * g * s / (g + s),
        "balanced_accuracy": np.mean([np.mean(r) for r in right.values()]),
        "majority": max(float(y.float().mean()), 1 - float(y.float().mean())),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_by_chance_no_more_than_all_words_are_chosen() -> None:
    made, (x, y, marks) = network(), documents()
    made.features.select = lambda part: torch.ones(part.shape)  # type: ignore[method-assign]
    found = scores_of(made, x, y, marks)
    g = int(marks.sum()) / int((x != 0).sum())
    assert found["chosen"] > 1  # padding, too
    assert found["chance_f1"] == pytest.approx(2 * g / (1 + g))


def test_without_marks_there_are_no_scores_of_them() -> None:
    x, y, _ = documents()
    found = scores_of(network(), x, y, None)
    assert not any("rationale" in name or name == "chance_f1" for name in found)


def reviews(method: str, rounds: int, test_reviews: int, **more: Any) -> Experiment:
    sections: dict[str, Any] = {
        "data": {**REVIEWS["data"], "test_reviews": test_reviews},
        "partition": REVIEWS["partition"],
        "model": {"name": "rationale", "hidden": 3},
    }
    return small_experiment(
        **{**sections, **more}, method={"name": method}, train={"rounds": rounds}
    )


def test_a_run_records_them_whatever_the_method(tmp_path: Path) -> None:
    made = reviews("fedprox", 1, test_reviews=300)  # 1,200, in three parts
    done = run(made, tmp_path)
    fed, row, named = federation(made), done.rounds.iloc[-1], done.weights()
    fed.server.model.load(torch.cat([named[name].flatten() for name in fed.server.model.shapes]))
    data = made.data.load()
    x, y, marks = (torch.tensor(v) for v in (data.test_x, data.test_y, data.truth["signal"]))
    expected = scores_of(fed.server.model.module, x, y, marks)
    assert {name: row[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert row["majority"] == 0.5


def test_how_far_encoders_are_apart_is_on_record_after_every_round(tmp_path: Path) -> None:
    every = {"evaluate": {"every": 2}}
    made = reviews("fedbabu", 3, 5, **every)
    found, model = [], federation(made).server.model
    for state in server_states(made)[1:]:
        model.load(torch.tensor(state.weights))
        apart = encoder_distance(*model.module.encoders(), "l2")
        found.append(float(apart.detach()) ** 0.5)
    assert run(made, tmp_path).rounds["encoder_distance"].tolist() == pytest.approx(found)
    one_encoder = {"model": {"name": "rationale", "hidden": 3, "shared": True}}
    for none in (reviews("fedbabu", 1, 5, **one_encoder), reviews("local", 1, 5)):
        assert "encoder_distance" not in run(none, tmp_path).rounds


# likeness of representations


@given(seed=st.integers(0, 50), scale=st.floats(0.01, 100))
def test_rotation_and_scale_change_nothing(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(30, 4)), rng.normal(size=(30, 6))
    rotation, _ = np.linalg.qr(rng.normal(size=(4, 4)))
    found = linear_cka(x, y)
    centre = np.eye(30) - 1 / 30  # as a likeness of Gram matrices (Kornblith et al., Eq. 3)
    k, m = centre @ x @ x.T @ centre, centre @ y @ y.T @ centre
    assert found == pytest.approx((k * m).sum() / np.sqrt((k * k).sum() * (m * m).sum()))
    assert linear_cka(scale * x @ rotation + 3, y) == pytest.approx(found)
    assert linear_cka(x, scale * x @ rotation) == pytest.approx(1)


def test_aspects_add_up() -> None:
    made, (x, y, marks) = network(), documents()
    aspects = np.array(["aroma"] * 4 + ["taste"] * (len(y) - 4))
    sliced = ("accuracy", "balanced_accuracy", "rationale_f1", "chance_f1")
    slices = ByColumn(Rationales(), aspects, sliced)
    totals = slices.totals(made, Batch(x, y, facts={"signal": marks}), 0)
    found, further = slices.scores(totals, 0)
    assert not further
    for name, value in scores_of(made, x, y, marks).items():
        assert found[name] == pytest.approx(value, abs=1e-6)
    for aspect, rows in (("aroma", slice(0, 4)), ("taste", slice(4, None))):
        own = scores_of(made, x[rows], y[rows], marks[rows])
        for name in sliced:
            assert found[f"{name}/{aspect}"] == pytest.approx(own[name])
    one = ByColumn(Rationales(), aspects[:4], sliced)
    alone, _ = one.scores(one.totals(made, Batch(x[:4], y[:4]), 0), 0)
    assert not any("/" in name for name in alone)
