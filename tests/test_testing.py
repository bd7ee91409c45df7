"""The conformance checks: every built-in component passes, and each check can fail."""

from __future__ import annotations

import re
from typing import Any

import broken_components as broken
import numpy as np
import pytest
from own_components import MultiLabel, Tagged
from own_objects import Net, Plain

from fedsim import Dataset, Run, run
from fedsim.data import datasets
from fedsim.errors import ExperimentError
from fedsim.models import models
from fedsim.objectives import Classification, Regression
from fedsim.testing import (
    check_explainer,
    check_method,
    check_model,
    check_objective,
    check_partition,
    small_experiment,
)

DIGITS = datasets.parse({"name": "digits"})
SHORT: dict[str, Any] = {"train": {"rounds": 4}, "checkpoint": {"every": 2}}


def labelled() -> Dataset:
    x = np.random.default_rng(0).normal(size=(90, 4))
    return Dataset.of(x, np.arange(90) % 3)


def test_a_method_is_interrupted_and_resumed() -> None:
    with pytest.raises(ExperimentError, match=r"needs train\.rounds=3 or more, not 2"):
        check_method({"name": "fedavg"}, train={"rounds": 2})


class TestBuiltIns:
    """Methods, partitions and explainers have files of their own."""

    @pytest.mark.parametrize(
        "name", [n for n, m in models.items() if m.kind == "network" and m.inputs == "numbers"]
    )
    def test_models(self, name: str) -> None:
        check_model({"name": name}, shape=(1, 16, 16))

    def test_objectives(self) -> None:
        check_objective(Classification(), labelled())
        check_objective(Regression(), datasets.parse({"name": "friedman"}).load())

    def test_a_user_s_own(self) -> None:
        check_objective(MultiLabel(), Tagged().load())
        check_model(Net, shape=(5,), outputs=2)
        check_method(Plain(), **SHORT)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (broken.ChangesItsState, "round 1 changes state.rounds in place; return a new state"),
        (broken.Forgets, "after a checkpoint, state.weights of round 3 comes out otherwise: what"),
        (broken.CountsOutside, "interrupted in round 3 and resumed, its result is another"),
        (broken.OfItsOwn, "trained three at once, clients come to other weights; loss and"),
    ],
)
def test_broken_methods(method: Any, message: str) -> None:
    with pytest.raises(
        AssertionError, match=re.escape(f"broken_components:{method.__name__}: {message}")
    ):
        check_method(method, **SHORT)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (broken.NoPrimary, "0 of its metrics are primary; one must be"),
        (broken.Unscored, "has no score for its metric 'f1'"),
        (broken.MeanLoss, "loss must return one number for each example, (18,), not ()"),
        (broken.MixedLoss, "the loss of an example depends on what else is in the batch"),
        (broken.OtherGradient, "output_gradient returns other losses, or another gradient, than"),
        (broken.MeansOfBatches, "where they are cut into batches; totals must be sums or arrays"),
    ],
)
def test_broken_objectives(objective: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        check_objective(objective(), labelled())


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        (broken.Twice, "deals an example out twice"),
        (broken.Beyond, "deals out examples that there are not"),
        (broken.OwnDraws, "deals otherwise each time"),
        (broken.SameDraws, "does not depend on the seed; draw from `rng` alone"),
        (broken.ByCut, "client 2 holds other examples once its share is cut"),
    ],
)
def test_broken_partitions(partition: Any, message: str) -> None:
    check_partition(broken.Shuffled(), labelled())
    with pytest.raises(AssertionError, match=re.escape(message)):
        check_partition(partition(), labelled())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (broken.OtherOutputs, "returns (6, 4) for 6 inputs, not (6, 3)"),
        (broken.OwnRandom, "from the same random state it builds another network; draw from"),
        (broken.Idle, "parameter 'idle' gets no gradient; leave it out, or set requires_grad=Fal"),
        (broken.Centred, "in evaluation an example's outputs depend on what else is in the batch"),
        (broken.Noisy, "in evaluation it returns something else twice"),
        (broken.Infinite, "returns numbers that are not finite"),
    ],
)
def test_broken_models(model: Any, message: str) -> None:
    check_model(broken.Network, shape=(5,), outputs=3)
    with pytest.raises(AssertionError, match=re.escape(message)):
        check_model(model, shape=(5,), outputs=3)


class TestExplainers:
    @pytest.fixture(scope="class")
    @staticmethod
    def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
        return run(small_experiment(train={"rounds": 1}), tmp_path_factory.mktemp("run"))

    @pytest.mark.parametrize(
        ("explainer", "message"),
        [
            (broken.Babbles, "says something else twice"),
            (broken.Empty, "has no rows"),
            (broken.Lists, "rows hold numbers and words; 'words' is a list"),
            (broken.Promises, "picture.png among its pictures, which it did not write"),
            (broken.Trains, "changes the network's modes"),
            (broken.Spoils, "changes the network's weights"),
            (broken.Draws, "draws from torch's global generator; draw from `rng`"),
        ],
    )
    def test_broken(self, done: Run, explainer: Any, message: str) -> None:
        check_explainer(broken.Speaks(), done)
        with pytest.raises(AssertionError, match=re.escape(message)):
            check_explainer(explainer(), done)
