"""Every method and every explainer on a card that is not there (see tests/fake_card.py)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import result_hashes
import torch
from fake_card import fake_card
from matplotlib.figure import Figure
from numpy.typing import NDArray
from own_explainer import GradientNorm
from torch import Tensor, nn
from trained import TRAINED, settings, trained

from experiments import (
    FOUR,
    KINDS,
    NETWORK_METHODS,
    NUMBERS,
    REVIEWS,
    by_day,
    small_experiment,
)
from fedsim import Client, Run, Update, run
from fedsim.errors import ClientError
from fedsim.explain import ExplainedData, ExplainedModel, Explanation
from fedsim.explain.explainers import explainers
from fedsim.explain.inputs import Inputs
from fedsim.methods.fedavg import FedAvg
from fedsim.objectives import Classification
from fedsim.testing import check_explainer
from fedsim.training import Context, captured

pytestmark = pytest.mark.filterwarnings("ignore:.*words get random vectors")

# Whose sums are computed in another order: attention and recurrent layers in smaller operations,
# and images whose channels are not last in memory.
ROUNDED = ("xpfl", "cnn", "resnet8", "rationales")
TIMES = ["seconds", "explain_seconds"]

with tempfile.TemporaryDirectory() as folder:
    FURTHER = [n for n in result_hashes.experiments(Path(folder)) if n not in NETWORK_METHODS]
# By day some that make tensors of their own at clients or at the server.
BY_DAY = ("scaffold", "fedaux", "fedfed", "fedgen", "hist_trees")
SMALLER = {**REVIEWS["data"], "reviews": 8, "fillers": 3, "length": 10}
CHOSEN = {"fedweit, tasks", "fedseit, top_k", "openfl_xai, tsk", "scaffold, private"}


def assert_same_result(name: str, there: Run, here: Run) -> None:
    if not any(word in name for word in ROUNDED):
        assert there.result_hash == here.result_hash
        return
    one, other = (
        done.rounds.select_dtypes("number").drop(columns=TIMES, errors="ignore")
        for done in (there, here)
    )
    pd.testing.assert_frame_equal(one, other, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("name", by_day(TRAINED, BY_DAY))
def test_methods_come_to_the_same_bits(tmp_path: Path, name: str) -> None:
    with fake_card():
        there = run(small_experiment(**settings(name)), tmp_path, progress=False)
    assert_same_result(name, there, trained(name).run)


@pytest.mark.parametrize("name", by_day(FURTHER, CHOSEN))
def test_so_do_other_models_and_data(tmp_path: Path, name: str) -> None:
    sections = result_hashes.experiments(tmp_path)[name]
    if "rationales" in name:  # whose steps are many small operations
        sections |= {"data": SMALLER}
    here = run(small_experiment(**sections), tmp_path / "here", progress=False)
    with fake_card():
        there = run(small_experiment(**sections), tmp_path / "there", progress=False)
    assert_same_result(name, there, here)


def test_why_gradients_are_not_captured_is_said_once(tmp_path: Path) -> None:
    def fail(gradient: Any) -> Any:
        raise RuntimeError("the stream is busy")

    lines: list[Any] = []
    experiment = small_experiment(train={"rounds": 2}, engine={"clients_per_step": 5})
    with fake_card(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured, "capture", fail)
        run(experiment, tmp_path, lines.append)
    line = "steps of stacks are not captured in CUDA graphs: RuntimeError: the stream is busy"
    assert lines.count(line) == 1


# explainers


FOR_ONE: dict[str, Any] = {"train": {"rounds": 1}}
IMAGES: dict[str, Any] = {
    **{"data": {"name": "digits", "subset": 0.1}, "model": {"name": "cnn", "channels": [4, 4]}},
    **FOR_ONE,
}
# Explainers by what they explain.
EXPLAINED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "images": (
        IMAGES,
        {
            *("gradient", "gradient_x_input", "integrated_gradients", "lrp", "occlusion"),
            *("random", "sage", "smoothgrad", "tree"),
            *("captum", "deep_shap", "gradient_shap", "kernel_shap"),
        },
    ),
    "rationales": (
        {**KINDS["rationales"], "data": SMALLER, **FOR_ONE},
        {"rationale", "occlusion"},
    ),
    "rules": ({**KINDS["rules"], **FOR_ONE}, {"rules"}),
    "what is shared": (
        {
            **{**IMAGES, "train": {"rounds": 3}},
            "method": {"name": "fedxds", "warmup_rounds": 1},
        },
        {"shared_images"},
    ),
    "shape functions": (
        {**NUMBERS, "model": {"name": "nam", "hidden": [4]}, **FOR_ONE},
        {"shape_functions"},
    ),
    "concepts": (
        {
            "data": {"name": "shapes", "samples": 100, "test_samples": 30},
            "partition": FOUR,
            "model": {"name": "concept_bottleneck", "network": {"name": "mlp", "hidden": [4]}},
            **FOR_ONE,
        },
        {"concepts"},
    ),
    "trees": ({**KINDS["trees"], **FOR_ONE}, {"leaves", "tree_shap"}),
    "transformers": (
        {**IMAGES, "model": {"name": "vit", "dim": 8, "depth": 2, "heads": 2}},
        {"attention_rollout", "attn_lrp", "gradcam"},
    ),
    "tasks": ({}, {"tasks"}),  # whose documents have to be written first
}
LITTLE = {
    "tree": {"images": 60, "perplexity": 5, "iterations": 300},
    "sage": {"baseline": {"train": 8}, "permutations": 2},
}


def explained(kind: str, folder: Path) -> tuple[dict[str, Any], set[str]]:
    """The sections of a small experiment, and which explainers explain its model."""
    sections, names = EXPLAINED[kind]
    return sections or result_hashes.experiments(folder)["fedseit, top_k"], names


@pytest.mark.parametrize("kind", EXPLAINED)
def test_explainers_keep_the_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # Pictures are not drawn on the card.
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: path.touch())
    sections, names = explained(kind, tmp_path)
    with fake_card():
        done = run(small_experiment(**sections), tmp_path / "runs", progress=False)
        for name in sorted(names):
            check_explainer(explainers.parse({"name": name, **LITTLE.get(name, {})}), done)


def test_all_explainers_are_tried() -> None:
    assert set().union(*(names for _, names in EXPLAINED.values())) == set(
        dict(explainers.items())
    )


# mistakes are found


def forgetful(network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
    """Where these zeros lie is left to chance."""
    return Classification().loss(network, x, y, context) + torch.zeros(len(y))


def indexing(network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
    """An index may lie in main memory."""
    return Classification().loss(network, x, y, context)[torch.arange(len(y))]


class Losing(FedAvg):
    """Trains with a loss of its own."""

    name: str = "test_on_a_card:Losing"
    forgets: bool = False

    def local_update(self, client: Client, weights: Tensor) -> Update:
        trained = client.train(weights, loss=forgetful if self.forgets else indexing)
        return Update(weights=trained, weight=client.num_samples)


class Hasty(GradientNorm):
    """Its numbers are read where they lie."""

    name: str = "test_on_a_card:Hasty"

    def explain(
        self, model: ExplainedModel, data: ExplainedData, inputs: Inputs, rng: np.random.Generator
    ) -> Explanation:
        x: NDArray[Any] = data.prepare(inputs.x).numpy()
        assert x.size
        return super().explain(model, data, inputs, rng)


def test_a_tensor_that_was_left_in_main_memory_is_found(tmp_path: Path) -> None:
    experiment = small_experiment(method=Losing(forgets=True), train={"rounds": 1})
    run(experiment, tmp_path, progress=False)
    with fake_card(), pytest.raises(ClientError, match="expected all tensors to be on the card"):
        run(experiment, tmp_path, progress=False)


def test_an_index_in_main_memory_is_none(tmp_path: Path) -> None:
    with fake_card():
        run(small_experiment(method=Losing(), train={"rounds": 1}), tmp_path, progress=False)


def test_an_array_of_what_is_on_the_card_is_found(tmp_path: Path) -> None:
    experiment = small_experiment(train={"rounds": 1})
    check_explainer(Hasty(), run(experiment, tmp_path, progress=False))
    with fake_card():
        done = run(experiment, tmp_path, progress=False)
        with pytest.raises(TypeError, match="can't convert a tensor on the card to numpy"):
            check_explainer(Hasty(), done)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: torch.zeros(3)[x.argsort()],
        lambda x: torch.cat([x, torch.zeros(1)]),
        lambda x: torch.stack([x, torch.zeros(3)]),
        lambda x: x.index_add(0, torch.arange(3), x),
        lambda x: x.where(torch.tensor([True, False, True]), 0.0),
        lambda x: x @ torch.ones(()).expand(3),
        lambda x: np.asarray(x),
        lambda x: x.kthvalue(1),
        lambda x: x.cumsum(0),
    ],
)
def test_what_cuda_refuses(operation: Callable[[Tensor], Any]) -> None:
    with fake_card(), pytest.raises((RuntimeError, TypeError), match="card"):
        operation(torch.zeros(3).to("meta"))


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda x: x + torch.tensor(1.0), [1.0, 2.0, 3.0]),
        (lambda x: x[torch.tensor([2, 0])], [2.0, 0.0]),
        (lambda x: x[torch.tensor([True, False, True])], [0.0, 2.0]),
        (lambda x: x.copy_(torch.ones(3)), [1.0, 1.0, 1.0]),
        (lambda x: torch.tensor([1.0, 0.5, 2.0], device=x.device) * x, [0.0, 0.5, 4.0]),
        (lambda x: x.int().cumsum(0), [0, 1, 3]),
        (lambda x: torch.ones(3) + x.cpu(), [1.0, 2.0, 3.0]),
    ],
)
def test_what_cuda_accepts(operation: Callable[[Tensor], Tensor], expected: list[float]) -> None:
    with fake_card():
        assert operation(torch.arange(3.0).to("meta")).tolist() == expected
