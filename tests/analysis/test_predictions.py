"""Predictions for the test set are those that a run was scored by."""

from __future__ import annotations

import numpy as np
import pytest
from own_components import Tagged

from experiments import NUMBERS, Finish, ran, refusal, run_example
from fedsim import Run, predictions, replay


class TestOfClasses:
    @pytest.fixture(scope="class")
    def done(self) -> Run:
        data = {"name": "synthetic", "test_samples": 730, "shape": [6]}
        return ran(train={"rounds": 3}, data=data)

    def test_the_global_model(self, done: Run) -> None:
        found = predictions(done)
        data = replay(done).dataset
        assert found["row"].tolist() == list(range(730))  # more than one shard
        assert found["target"].tolist() == [data.classes[c] for c in data.test_y]
        p = found.filter(like="probability/")
        assert p.columns.tolist() == [f"probability/{name}" for name in data.classes]
        np.testing.assert_allclose(p.sum(axis=1), 1)
        assert found["prediction"].tolist() == [data.classes[c] for c in p.to_numpy().argmax(1)]
        right = found["target"] == found["prediction"]
        assert right.mean() == done.rounds["accuracy"].iloc[-1]
        chosen = p.to_numpy()[np.arange(730), data.test_y]
        assert -np.log(chosen).mean() == pytest.approx(done.rounds["loss"].iloc[-1], abs=1e-6)

        early = predictions(done, after=1)
        assert (early["target"] == early["prediction"]).mean() == done.rounds["accuracy"].iloc[0]

    def test_of_a_client(self, done: Run) -> None:
        own = predictions(done, client=3)
        assert len(own) == 730
        assert not own.equals(predictions(done, client=4))
        assert not own.equals(predictions(done))
        run_example(predictions, folder=done.path)
        told = refusal(lambda: predictions(done, client=10))
        assert "there is no client 10; there are 10" in told
        assert "there is no round 4; it has 3" in refusal(lambda: predictions(done, after=4))


def test_of_a_number() -> None:
    done = ran(**NUMBERS, train={"rounds": 2, "optimizer": {"lr": 0.01}})
    found = predictions(done)
    assert found.columns.tolist() == ["row", "target", "prediction"]
    mse = np.square(found["target"] - found["prediction"]).mean()
    assert mse == pytest.approx(done.rounds["loss"].iloc[-1], rel=1e-6)


def test_of_several_targets(finish: Finish) -> None:
    done = finish(
        data={"name": "own_components:Tagged"},
        partition={"kind": "iid", "clients": 2},
        objective={"name": "own_components:MultiLabel"},
        train={"rounds": 2},
    )
    found = predictions(done)
    outputs = found[[f"output/{k}" for k in range(3)]].to_numpy()
    targets = found[[f"target/{k}" for k in range(3)]].to_numpy()
    np.testing.assert_array_equal(targets, Tagged().load().test_y)
    right = ((outputs > 0) == (targets > 0.5)).mean(axis=0)
    for k, tag in enumerate(("round", "red", "heavy")):
        assert done.rounds[f"accuracy/{tag}"].iloc[-1] == pytest.approx(right[k])


def test_examples_are_those_of_the_task(finish: Finish) -> None:
    tasks = ([["0", "1"], ["2", "3"]], [["4", "5"], ["6", "7"]])
    done = finish(partition={"kind": "own_tasks", "tasks": tasks}, train={"rounds": 2})
    found = predictions(done, client=1)
    assert set(found["target"]) == set(found["prediction"]) == {"6", "7"}
    others = found[[f"probability/{c}" for c in "01234589"]]
    assert (others.to_numpy() == 0).all()


def test_runs_that_are_not_finished_or_have_no_global_model(finish: Finish) -> None:
    done = finish(method={"name": "local"}, train={"rounds": 1})
    assert "method.name=local has no global model" in refusal(lambda: predictions(done))
    assert len(predictions(done, client=0)) == 360
    done.manifest.pop("result_hash")
    assert "the run is not finished" in refusal(lambda: predictions(done))
    assert Run.open(done.path).result_hash
