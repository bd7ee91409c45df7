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

from experiments import FEW
from fedsim import Dataset, Run, run
from fedsim.data import datasets
from fedsim.errors import ExperimentError
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

Check = Callable[[Run], None]
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


def of_method(method: type) -> Check:
    return lambda done: check_method(method, **SHORT)


def of_objective(how: str, kind: Any = broken.Scores) -> Check:
    return lambda done: check_objective(kind(how=how), labelled())


def of_partition(how: str = "sound") -> Check:
    return lambda done: check_partition(broken.Shuffled(how=how), labelled())


def of_model(how: str = "sound") -> Check:
    model = {"name": "broken_components:Network", "how": how}
    return lambda done: check_model(model, shape=(5,), outputs=3)


def of_explainer(how: str = "sound") -> Check:
    return lambda done: check_explainer(broken.Speaks(how=how), done)


@pytest.mark.parametrize("sound", [of_partition(), of_model(), of_explainer()])
def test_what_the_broken_ones_extend_is_sound(done: Run, sound: Check) -> None:
    sound(done)


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (
            of_method(broken.ChangesItsState),
            "ChangesItsState: round 1 changes state.rounds in place; return a new state",
        ),
        (
            of_method(broken.Forgets),
            "Forgets: after a checkpoint, state.weights of round 3 comes out otherwise: what",
        ),
        (
            of_method(broken.CountsOutside),
            "CountsOutside: interrupted in round 3 and resumed, its result is another",
        ),
        (of_method(broken.OfItsOwn), "OfItsOwn: trained three at once, clients come to other wei"),
        (of_objective("no primary"), "0 of its metrics are primary; one must be"),
        (of_objective("unscored"), "has no score for its metric 'f1'"),
        (of_objective("mean", broken.Losses), "one number for each example, (18,), not ()"),
        (of_objective("mixed", broken.Losses), "the loss of an example depends on what else is"),
        (of_objective("other gradient"), "output_gradient returns other losses, or another grad"),
        (of_objective("means of batches"), "where they are cut into batches; totals must be sums"),
        (of_partition("twice"), "deals an example out twice"),
        (of_partition("beyond"), "deals out examples that there are not"),
        (of_partition("own draws"), "deals otherwise each time"),
        (of_partition("same draws"), "does not depend on the seed; draw from `rng` alone"),
        (of_partition("by cut"), "client 2 holds other examples once its share is cut"),
        (of_model("other outputs"), "returns (6, 4) for 6 inputs, not (6, 3)"),
        (of_model("own random"), "from the same random state it builds another network; draw fro"),
        (of_model("idle"), "parameter 'idle' gets no gradient; leave it out, or set requires_gr"),
        (of_model("centred"), "in evaluation an example's outputs depend on what else is in the"),
        (of_model("noisy"), "in evaluation it returns something else twice"),
        (of_model("infinite"), "returns numbers that are not finite"),
        (of_explainer("babbles"), "says something else twice"),
        (of_explainer("empty"), "has no rows"),
        (of_explainer("lists"), "rows hold numbers and words; 'words' is a list"),
        (of_explainer("promises"), "picture.png among its pictures, which it did not write"),
        (of_explainer("trains"), "changes the network's modes"),
        (of_explainer("spoils"), "changes the network's weights"),
        (of_explainer("draws"), "draws from torch's global generator; draw from `rng`"),
    ],
)
def test_what_is_broken_is_named(done: Run, check: Check, message: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        check(done)
