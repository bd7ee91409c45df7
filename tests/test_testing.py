"""The conformance checks: every built-in component passes, and each check can fail."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import broken_components as broken
import numpy as np
import pytest
from own_components import MultiLabel, Tagged
from own_objects import Net, Plain
from torch import nn

from experiments import FEW
from fedsim import Dataset, Run, run
from fedsim.data import Partition, datasets
from fedsim.errors import ExperimentError
from fedsim.explain import Explainer
from fedsim.methods.fedavg import FedAvg
from fedsim.models import models
from fedsim.objectives import Classification, Concepts, Regression
from fedsim.testing import (
    check_explainer,
    check_method,
    check_model,
    check_objective,
    check_partition,
    small_experiment,
)

SHORT: dict[str, Any] = {"data": FEW, "train": {"rounds": 4}, "checkpoint": {"every": 2}}


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
        check_model({"name": name}, shape=(16,) if name == "nam" else (1, 16, 16))

    def test_objectives(self) -> None:
        check_objective(Classification(), labelled())
        check_objective(Regression(), datasets.parse({"name": "friedman"}).load())
        of_concepts = datasets.parse({"name": "shapes", "samples": 40, "test_samples": 40}).load()
        check_objective(Concepts(), of_concepts, {"name": "concept_bottleneck"})

    def test_a_user_s_own(self) -> None:
        check_objective(MultiLabel(), Tagged().load())
        check_model(Net, shape=(5,), outputs=2)
        check_method(Plain(), **SHORT)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(small_experiment(train={"rounds": 1}), tmp_path_factory.mktemp("run"))


CHECKS: dict[type, Callable[[Any, Run], None]] = {
    FedAvg: lambda method, done: check_method(method, **SHORT),
    Classification: lambda objective, done: check_objective(objective(), labelled()),
    Partition: lambda partition, done: check_partition(partition(), labelled()),
    nn.Module: lambda model, done: check_model(model, shape=(5,), outputs=3),
    Explainer: lambda explainer, done: check_explainer(explainer(), done),
}


def check(component: type, done: Run) -> None:
    (of_its_kind,) = (check for kind, check in CHECKS.items() if issubclass(component, kind))
    of_its_kind(component, done)


@pytest.mark.parametrize("sound", [broken.Shuffled, broken.Network, broken.Speaks])
def test_what_the_broken_ones_extend_is_sound(done: Run, sound: type) -> None:
    check(sound, done)


@pytest.mark.parametrize(
    ("component", "message"),
    [
        (
            broken.ChangesItsState,
            "ChangesItsState: round 1 changes state.rounds in place; return a new state",
        ),
        (
            broken.Forgets,
            "Forgets: after a checkpoint, state.weights of round 3 comes out otherwise: what",
        ),
        (
            broken.CountsOutside,
            "CountsOutside: interrupted in round 3 and resumed, its result is another",
        ),
        (
            broken.OfItsOwn,
            "OfItsOwn: trained three at once, clients come to other weights; loss and",
        ),
        (broken.NoPrimary, "0 of its metrics are primary; one must be"),
        (broken.Unscored, "has no score for its metric 'f1'"),
        (broken.MeanLoss, "loss must return one number for each example, (18,), not ()"),
        (broken.MixedLoss, "the loss of an example depends on what else is in the batch"),
        (broken.OtherGradient, "output_gradient returns other losses, or another gradient, than"),
        (broken.MeansOfBatches, "where they are cut into batches; totals must be sums or arrays"),
        (broken.Twice, "deals an example out twice"),
        (broken.Beyond, "deals out examples that there are not"),
        (broken.OwnDraws, "deals otherwise each time"),
        (broken.SameDraws, "does not depend on the seed; draw from `rng` alone"),
        (broken.ByCut, "client 2 holds other examples once its share is cut"),
        (broken.OtherOutputs, "returns (6, 4) for 6 inputs, not (6, 3)"),
        (broken.OwnRandom, "from the same random state it builds another network; draw from"),
        (broken.Idle, "parameter 'idle' gets no gradient; leave it out, or set requires_grad=Fal"),
        (broken.Centred, "in evaluation an example's outputs depend on what else is in the batch"),
        (broken.Noisy, "in evaluation it returns something else twice"),
        (broken.Infinite, "returns numbers that are not finite"),
        (broken.Babbles, "says something else twice"),
        (broken.Empty, "has no rows"),
        (broken.Lists, "rows hold numbers and words; 'words' is a list"),
        (broken.Promises, "picture.png among its pictures, which it did not write"),
        (broken.Trains, "changes the network's modes"),
        (broken.Spoils, "changes the network's weights"),
        (broken.Draws, "draws from torch's global generator; draw from `rng`"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_broken_is_named(done: Run, component: type, message: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        check(component, done)
