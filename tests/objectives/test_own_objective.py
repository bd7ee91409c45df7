"""A user's own objective, with metrics that the package has not heard of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_components import TAGS, MultiLabel, Tagged

from experiments import Say, small_experiment
from fedsim import Run, run
from fedsim.errors import ExperimentError

Finish = Callable[..., Run]

MULTI_LABEL: dict[str, Any] = {
    "data": {"name": "own_components:Tagged"},
    "partition": {"kind": "iid", "clients": 6, "test_fraction": 0.3},
    "model": {"name": "mlp", "hidden": [16]},
    "objective": {"name": "own_components:MultiLabel"},
    "train": {"rounds": 5, "local_epochs": 8},
    "evaluate": {"clients": True},
}


def test_metrics_are_columns_of_rounds_and_clients(finish: Finish) -> None:
    done = finish(**MULTI_LABEL)
    data, rounds = Tagged().load(), done.rounds
    assert rounds["macro_f1"].iloc[-1] > rounds["macro_f1"].iloc[0]
    assert rounds["auroc"].iloc[-1] > 0.85
    # As worked out at once on the whole test set.
    network = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)
    )
    weights = done.weights()
    shapes = {name: tuple(w.shape) for name, w in weights.items()}
    assert sorted(shapes.values()) == [(3,), (3, 16), (16,), (16, 8)]
    by_shape = {tuple(w.shape): w for w in weights.values()}
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(by_shape[tuple(parameter.shape)])
        found = (network(torch.from_numpy(data.test_x)) > 0).numpy() == (data.test_y > 0.5)
    for k, tag in enumerate(TAGS):
        assert rounds[f"accuracy/{tag}"].iloc[-1] == pytest.approx(found[:, k].mean())
    last = done.clients[done.clients["round"] == 5]
    assert np.isclose(rounds["client_macro_f1"].iloc[-1], last["test_macro_f1"].mean())
    assert rounds["worst_client_macro_f1"].iloc[-1] == last["test_macro_f1"].min()


@pytest.mark.parametrize("method", ["fedprox", "scaffold", "local", "centralised"])
def test_methods_that_ask_nothing_of_labels_learn_it(finish: Finish, method: str) -> None:
    done = finish(**MULTI_LABEL, method={"name": method})
    assert done.rounds["auroc"].iloc[-1] > 0.7


@pytest.mark.parametrize("method", ["fedgen", "moon", "feddisco"])
def test_methods_that_need_classes_are_refused(method: str) -> None:
    with pytest.raises(ExperimentError) as refusal:
        small_experiment(**MULTI_LABEL, method={"name": method})
    told = str(refusal.value)
    assert f"method.name={method} learns classification, and the objective is" in told
    assert "methods that can: " in told
    assert "fedavg" in told.partition("methods that can: ")[2]


def test_stacks_train_it_as_well(finish: Finish) -> None:
    alone = finish(**MULTI_LABEL)
    stacked = finish(**MULTI_LABEL, engine={"clients_per_step": 3})
    for name, weights in alone.weights().items():
        torch.testing.assert_close(stacked.weights()[name], weights, atol=1e-4, rtol=1e-3)


@pytest.mark.usefixtures("own_ray", "driver_here")
def test_shards_on_two_actors_score_the_same(finish: Finish) -> None:
    local = finish(**MULTI_LABEL)
    ray = finish(**MULTI_LABEL, engine={"kind": "ray", "actors": 2})
    assert ray.result_hash == local.result_hash


def test_report_and_summary_show_its_metrics(tmp_path: Path, say: Say) -> None:
    done = run(small_experiment(**MULTI_LABEL), tmp_path)
    page = tmp_path / "page.html"
    code, _, err = say("report", str(done.path), "--out", str(page))
    assert code == 0, err
    text = page.read_text()
    assert "macro F1" in text
    assert "AUROC" in text
    assert "calibration error" in text
    assert [metric.column for metric in done.metrics] == [
        metric.column for metric in MultiLabel().metrics(Tagged().load())
    ]
