"""A user's own objective, with metrics that the package has not heard of."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from own_components import TAGS, MultiLabel, Tagged

from experiments import Finish, by_day, small_experiment
from fedsim import Run, run
from fedsim.errors import ExperimentError
from fedsim.launch.prepare import prepare

MULTI_LABEL: dict[str, Any] = {
    "data": {"name": "own_components:Tagged"},
    "partition": {"kind": "iid", "clients": 6, "test_fraction": 0.3},
    "model": {"name": "mlp", "hidden": [16]},
    "objective": {"name": "own_components:MultiLabel"},
    "train": {"rounds": 5, "local_epochs": 8},
    "evaluate": {"clients": True},
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(small_experiment(**MULTI_LABEL), tmp_path_factory.mktemp("runs"), progress=False)


def test_metrics_are_columns_of_rounds_and_clients(done: Run) -> None:
    data, rounds = Tagged().load(), done.rounds
    assert rounds["macro_f1"].iloc[-1] > rounds["macro_f1"].iloc[0]
    assert rounds["auroc"].iloc[-1] > 0.85
    # As worked out at once on the whole test set.
    network = prepare(done.experiment)[2].build_model().eval()
    network.load_state_dict(done.weights())
    with torch.no_grad():
        found = (network(torch.from_numpy(data.test_x)) > 0).numpy() == (data.test_y > 0.5)
    for k, tag in enumerate(TAGS):
        assert rounds[f"accuracy/{tag}"].iloc[-1] == pytest.approx(found[:, k].mean())
    last = done.clients[done.clients["round"] == 5]
    assert np.isclose(rounds["client_macro_f1"].iloc[-1], last["test_macro_f1"].mean())
    assert rounds["worst_client_macro_f1"].iloc[-1] == last["test_macro_f1"].min()


@pytest.mark.parametrize(
    "method", by_day(["fedprox", "scaffold", "local", "centralised"], ["scaffold", "local"])
)
def test_methods_that_ask_nothing_of_labels_learn_it(finish: Finish, method: str) -> None:
    done = finish(**MULTI_LABEL, method={"name": method})
    assert done.rounds["auroc"].iloc[-1] > 0.7


@pytest.mark.parametrize("method", ["fedgen", "moon", "feddisco"])
def test_methods_that_need_classes_are_refused(method: str) -> None:
    with pytest.raises(ExperimentError) as refusal:
        small_experiment(**MULTI_LABEL, method={"name": method})
    told = str(refusal.value)
    assert re.search(f"method.name={method} learns classification( or concepts)?, and the", told)
    assert "methods that can: " in told
    assert "fedavg" in told.partition("methods that can: ")[2]


def test_stacks_train_it_as_well(finish: Finish, done: Run) -> None:
    stacked = finish(**MULTI_LABEL, engine={"clients_per_step": 3})
    for name, weights in done.weights().items():
        torch.testing.assert_close(stacked.weights()[name], weights, atol=1e-4, rtol=1e-3)


@pytest.mark.night
@pytest.mark.usefixtures("own_ray", "driver_here")
def test_shards_on_two_actors_score_the_same(finish: Finish, done: Run) -> None:
    ray = finish(**MULTI_LABEL, engine={"kind": "ray", "actors": 2})
    assert ray.result_hash == done.result_hash


def test_reports_know_its_metrics(done: Run) -> None:
    assert [metric.column for metric in done.metrics] == [
        metric.column for metric in MultiLabel().metrics(Tagged().load())
    ]
