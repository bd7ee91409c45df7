"""A component for each way to break a contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim import Client, Dataset, Federation, State, Update
from fedsim.data import Partition
from fedsim.explain import ExplainedData, ExplainedModel, Explainer, Explanation
from fedsim.explain.inputs import Inputs
from fedsim.methods.fedavg import FedAvg
from fedsim.objectives import Batch, Classification, Metric, Totals
from fedsim.objectives.objective import OutputGradient

# methods


@dataclass(frozen=True)
class Logbook(State):
    rounds: list[int]


class ChangesItsState(FedAvg):
    def init(self, fed: Federation) -> Logbook:
        return Logbook(super().init(fed).weights, [])

    def round(self, fed: Federation, state: State, t: int) -> State:
        assert isinstance(state, Logbook)
        state.rounds.append(t)
        return Logbook(super().round(fed, State(state.weights), t).weights, state.rounds)


class Forgets(FedAvg):
    """Keeps what later rounds need beside the state."""

    seen: ClassVar[dict[int, int]] = {}

    def round(self, fed: Federation, state: State, t: int) -> State:
        rounds = Forgets.seen[id(fed)] = Forgets.seen.get(id(fed), 0) + 1
        following = super().round(fed, state, t)
        return replace(following, weights=following.weights * np.float32(1 + rounds / 1000))


class CountsOutside(FedAvg):
    """Puts what is not in its state on record, in runs of more than three rounds."""

    calls: ClassVar[list[int]] = []

    def round(self, fed: Federation, state: State, t: int) -> State:
        CountsOutside.calls.append(t)
        fed.log(calls=len(CountsOutside.calls))
        return super().round(fed, state, t)


class OfItsOwn(FedAvg):
    """Its loss depends on who is trained beside it, through what it does not pass on."""

    latest: ClassVar[list[int]] = [0]

    def local_update(self, client: Client, weights: Tensor) -> Update:
        OfItsOwn.latest[0] = client.id
        trained = client.train(weights, loss=self.loss)
        return Update(weights=trained, weight=client.num_samples)

    def loss(
        self, network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]
    ) -> Tensor:
        scale = 1 + OfItsOwn.latest[0]
        return nn.functional.cross_entropy(network(x), y, reduction="none") * scale


# objectives


class Scores(Classification):
    """An objective that is broken in one place."""

    how: str

    def metrics(self, data: Dataset) -> tuple[Metric, ...]:
        if self.how == "no primary":
            return (Metric("accuracy", "accuracy"),)
        more = (Metric("f1", "F1"),) if self.how == "unscored" else ()
        return (*super().metrics(data), *more)

    def output_gradient(self) -> OutputGradient | None:
        right = super().output_gradient()
        assert right is not None

        def doubled(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            losses, gradient = right(outputs, y)
            return losses, 2 * gradient

        return doubled if self.how == "other gradient" else right

    def totals(self, outputs: Any, batch: Batch) -> Totals:
        n = len(batch) if self.how == "means of batches" else 1
        return {name: value / n for name, value in super().totals(outputs, batch).items()}

    def scores(self, totals: Totals) -> dict[str, float]:
        if self.how == "means of batches":
            return {"loss": sum(totals.values()), "accuracy": 0.5}
        return super().scores(totals)


class Losses(Classification):
    """One whose loss is broken."""

    how: str

    def loss(
        self, network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]
    ) -> Tensor:
        losses = super().loss(network, x, y, context)
        return losses.mean() if self.how == "mean" else losses / losses.detach().sum()


# partitions


class Shuffled(Partition):
    """A partition, sound or broken in one place."""

    how: str = "sound"

    def split(self, data: Dataset, rng: np.random.Generator) -> list[NDArray[np.int64]]:
        if self.how in ("own draws", "same draws"):
            rng = np.random.default_rng(None if self.how == "own draws" else 0)
        first, *rest = np.array_split(rng.permutation(len(data.y)), 3)
        if self.how == "twice":
            first = np.append(first, rest[0][0])
        elif self.how == "beyond":
            rest = [rows + 1 for rows in rest]
            first = first + 1
        elif self.how == "by cut" and self.test_fraction:
            rest[-1] = rest[-1][1:]
        return [first, *rest]


# models


class Network(nn.Module):
    """A network, sound or broken in one place."""

    def __init__(self, shape: tuple[int, ...], outputs: int, how: str = "sound") -> None:
        super().__init__()
        self.how = how
        self.layer = nn.Linear(int(np.prod(shape)), outputs + (how == "other outputs"))
        if how == "own random":
            drawn = np.random.default_rng().normal(size=self.layer.weight.shape)
            self.layer.weight = nn.Parameter(torch.tensor(drawn, dtype=torch.float32))
        elif how == "idle":
            self.idle = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "centred":
            x = x - x.mean(dim=0)
        elif self.how == "noisy":
            x = x + torch.rand_like(x)
        found: Tensor = self.layer(x.flatten(1))
        return found / 0 if self.how == "infinite" else found


# explainers


@dataclass(frozen=True)
class Said(Explanation):
    words: str
    listed: tuple[dict[str, Any], ...] = ({"word": "a"},)
    pictures: tuple[str, ...] = ()

    def text(self) -> str:
        return self.words

    def rows(self) -> list[dict[str, float | int | str | None]]:
        return list(self.listed)

    def save(self, folder: Path) -> list[Path]:
        return [folder / name for name in self.pictures]


class Speaks(Explainer):
    """An explainer, sound or broken in one place."""

    name: str = "speaks"
    how: str = "sound"

    def explain(
        self, model: ExplainedModel, data: ExplainedData, inputs: Inputs, rng: np.random.Generator
    ) -> Explanation:
        network = model.as_network()
        match self.how:
            case "babbles":
                return Said(str(np.random.default_rng().random()))
            case "empty":
                return Said("", ())
            case "lists":
                return Said("", ({"words": ["a"]},))
            case "promises":
                return Said("", pictures=("picture.png",))
            case "trains":
                network.train()
            case "spoils":
                next(network.parameters()).detach().add_(1)
            case "draws":
                torch.rand(1)
        return Said(str(rng.integers(100)))
