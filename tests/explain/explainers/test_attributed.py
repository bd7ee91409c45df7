"""`fedsim explain` of networks: attributions of any client's model, after any round."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from experiments import FOUR, KINDS, READER, REVIEWS, TABLE, Say, ran
from fedsim.analysis.replay import ModelSnapshot
from fedsim.data import Dataset
from fedsim.data.dataset import Scaling
from fedsim.explain import ExplainedData, ExplainedModel
from fedsim.explain.explainers.attribution import heatmap
from fedsim.explain.explainers.gradients import Gradient, GradientXInput, IntegratedGradients
from fedsim.explain.explainers.occlusion import Occlusion
from fedsim.explain.inputs import Inputs
from fedsim.models import models


def test_what_a_clients_model_of_a_round_looks_at(say: Say) -> None:
    done = ran(model={"name": "cnn", "channels": [4, 4]}, train={"rounds": 4})
    subject = ModelSnapshot.of(done, client=3, after=2)
    inputs = Inputs.of_rows(subject.dataset, [5, 9])
    found: Any = subject.explain(IntegratedGradients(), inputs)
    x = subject.data().prepare(inputs.x)
    about = subject.network(), x, subject.network()(x).argmax(dim=1), np.random.default_rng(0)
    np.testing.assert_array_equal(
        found.relevance, heatmap(IntegratedGradients().relevance(*about))
    )
    text = say.printed(
        *("explain", str(done.path), "--client", "3", "--round", "2", "--row", "5", "--row", "9")
    )
    assert text.startswith(f"{found.text()}\nwritten: ")
    title = "client 3's model after round 2, integrated_gradients:"
    assert text.startswith(f"{title}\n(baseline: zero in every pixel)\n\nrow 5: ")
    assert "half of the relevance is in " in text
    picture = done.path / "explanations" / "integrated_gradients-client-3-round-2-rows-5-9.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.filterwarnings("ignore:.*words get random vectors")
class TestDocuments:
    def test_words_that_speak_for_a_decision(self, say: Say) -> None:
        done = ran(**KINDS["documents"], train={"rounds": 2})
        subject = ModelSnapshot.of(done)
        inputs = Inputs.of_texts(subject.dataset, ["a lovely golden head"], ["text"])
        found = subject.explain(Occlusion(), inputs)
        label = int(subject.network()(torch.tensor(inputs.x))[0].argmax())
        text = say.printed("explain", str(done.path), "--text", "a lovely golden head")
        assert found.text() in text
        assert f"text: predicted {subject.dataset.classes[label]} (" in text
        assert "\n  for it: " in text or "\n  against it: " in text
        Path("some.txt").write_text("a murky head\n\n")
        text = say.printed("explain", str(done.path), "--input", "some.txt", "--client", "1")
        assert "line 1: " in text
        assert "line 2: " in text
        assert (done.path / "explanations" / "occlusion-client-1-round-2-some.png").exists()

    @pytest.mark.parametrize("name", ["fedweit", "fedseit"])
    def test_a_clients_network_of_its_last_task(self, say: Say, name: str) -> None:
        done = ran(
            data={**REVIEWS["data"], "domain": "hotel"},
            partition={"kind": "own_tasks", "tasks": [[["negative"], ["positive"]]] * 2},
            model=READER,
            method={"name": name},
            train={"rounds": 2, "optimizer": {"name": "adam", "lr": 0.01}},
        )
        text = say.printed("explain", str(done.path), "--client", "1", "--row", "3")
        title = "client 1's personal model after round 2, for its task 1 (positive), occlusion:"
        told = f"{title}\n(baseline: the document without the word)\n\nrow 3: predicted positive"
        assert text.startswith(told)
        complaint = say.refused("explain", str(done.path), "--row", "3")
        assert f"method.name={name} has no global model after round 2; clients may" in complaint


@pytest.mark.parametrize(
    ("x", "more", "words"),
    [
        (np.ones((2, 3)), {}, "zero in every feature"),
        (np.ones((2, 3)), {"scaling": Scaling(zero="the lower end")}, "zero, the lower end"),
        (np.ones((2, 3)), {"mean": (0.5,), "std": (1.0,)}, "zero, the mean input of the data"),
        (np.ones((2, 1, 4, 4)), {}, "zero in every pixel"),
        (np.ones((2, 1, 4, 4), np.uint8), {}, "zero, a black image"),
        (np.ones((2, 1, 4, 4)), {"mean": (0.5,), "std": (1.0,)}, "zero, the mean pixel of the"),
    ],
    ids=["features", "scaled", "centred", "pixels", "bytes", "centred pixels"],
)
def test_what_the_baseline_is(x: NDArray[Any], more: dict[str, Any], words: str) -> None:
    x, y = x if x.dtype == np.uint8 else x.astype(np.float32), np.array([0, 1])
    data = Dataset(x, y, x, y, ("no", "yes"), **more)
    network = nn.Sequential(nn.Flatten(), nn.Linear(x[0].size, 2))
    model = ExplainedModel(models.parse({"name": "mlp"}), "a model", 1, 0, network=network)
    given = ExplainedData(data, lambda x: torch.tensor(x, dtype=torch.float32))
    inputs, rng = Inputs.of_rows(data, [0]), np.random.default_rng(0)
    for explainer in (IntegratedGradients(), GradientXInput(), Occlusion()):
        text = explainer.explain(model, given, inputs, rng).text()
        assert text.splitlines()[1].startswith(f"(baseline: {words}")
    assert "baseline" not in Gradient().explain(model, given, inputs, rng).text()
    files = {
        Occlusion.model_validate({"baseline": baseline}).explain(model, given, inputs, rng).file
        for baseline in ("zero", "mean", {"reference": 1})
    }
    beside = {"", "-baseline-mean", "-baseline-row-1"}
    assert files == {f"occlusion{baseline}-row-0" for baseline in beside}


@pytest.mark.parametrize("predicts", [{"label": "grown"}, {"target": "cells"}])
def test_a_row_of_the_file_is_that_of_the_data(say: Say, predicts: dict[str, str]) -> None:
    """Of a table that is scaled: what is said of it is the same, in the units of the file."""
    rng = np.random.default_rng(0)
    size, cells = rng.normal(900, 300, 80).round(1), rng.normal(5, 1, 80).round(4)
    table = pd.DataFrame({"size": size, "cells": cells, "grown": size > 900})
    table.to_csv("all.csv", index=False)
    table[:6].to_csv("test.csv", index=False)
    done = ran(
        data={"name": "table", "path": "all.csv", "test_path": "test.csv", "scale": "minmax"}
        | predicts,
        partition={"kind": "iid", "clients": 4},
        train={"rounds": 2},
    )
    chosen = [word for k in range(6) for word in ("--row", str(k))]
    _, of_rows, _ = say("explain", str(done.path), *chosen)
    of_file = say.printed("explain", str(done.path), "--input", "test.csv")
    unlabelled = re.sub(r"(?<=\S), true (class|value) .*", "", of_rows)
    assert of_file == unlabelled.replace("-rows-0-1-2-3-4-5.png", "-test.png")
    picture = done.path / "explanations" / "integrated_gradients-round-2-test.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    if "target" in predicts:
        said = re.findall(r"^row \d: predicted (\S+), true value (\S+)$", of_rows, re.MULTILINE)
        assert [float(truth) for _, truth in said] == cells[:6].tolist()
        assert all(2 < float(predicted) < 8 for predicted, _ in said)


def test_many_inputs_of_another_shape(say: Say) -> None:
    done = ran(data={**TABLE, "shape": [2, 5]}, partition=FOUR, train={"rounds": 1})
    np.save("many.npy", np.random.default_rng(0).normal(size=(15, 2, 5)).astype(np.float32))
    text = say.printed("explain", str(done.path), "--input", "many.npy")
    assert "\ninput 14: " in text
    assert "x[1, 4] " in text
