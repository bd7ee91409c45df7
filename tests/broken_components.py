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


class NoPrimary(Classification):
    def metrics(self, data: Dataset) -> tuple[Metric, ...]:
        return (Metric("accuracy", "accuracy"),)


class Unscored(Classification):
    def metrics(self, data: Dataset) -> tuple[Metric, ...]:
        return (*super().metrics(data), Metric("f1", "F1"))


class MeanLoss(Classification):
    def loss(
        self, network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]
    ) -> Tensor:
        return super().loss(network, x, y, context).mean()


class MixedLoss(Classification):
    def loss(
        self, network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]
    ) -> Tensor:
        losses = super().loss(network, x, y, context)
        return losses / losses.detach().sum()


class OtherGradient(Classification):
    def output_gradient(self) -> OutputGradient | None:
        right = super().output_gradient()
        assert right is not None

        def doubled(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            losses, gradient = right(outputs, y)
            return losses, 2 * gradient

        return doubled


class MeansOfBatches(Classification):
    def totals(self, outputs: Any, batch: Batch) -> Totals:
        found = super().totals(outputs, batch)
        return {name: value / len(batch) for name, value in found.items()}

    def scores(self, totals: Totals) -> dict[str, float]:
        return {"loss": sum(totals.values()), "accuracy": 0.5}


# partitions


class Shuffled(Partition):
    def split(self, data: Dataset, rng: np.random.Generator) -> list[NDArray[np.int64]]:
        return np.array_split(rng.permutation(len(data.y)), 3)


class Twice(Shuffled):
    def split(self, data: Dataset, rng: np.random.Generator) -> list[NDArray[np.int64]]:
        first, *rest = super().split(data, rng)
        return [np.append(first, rest[0][0]), *rest]


class Beyond(Shuffled):
    def split(self, data: Dataset, rng: np.random.Generator) -> list[NDArray[np.int64]]:
        return [rows + 1 for rows in super().split(data, rng)]


class OwnDraws(Shuffled):
    def split(self, data: Dataset, rng: np.random.Generator) -> list[NDArray[np.int64]]:
        return super().split(data, np.random.default_rng())


class SameDraws(Shuffled):
    def split(self, data: Dataset, rng: np.random.Generator) -> list[NDArray[np.int64]]:
        return super().split(data, np.random.default_rng(0))


class ByCut(Shuffled):
    def split(self, data: Dataset, rng: np.random.Generator) -> list[NDArray[np.int64]]:
        parts = super().split(data, rng)
        return [*parts[:-1], parts[-1][1:]] if self.test_fraction else parts


# models


class Network(nn.Module):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(int(np.prod(shape)), outputs)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x.flatten(1))
        return found


class OtherOutputs(Network):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs + 1)


class OwnRandom(Network):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        drawn = np.random.default_rng().normal(size=self.layer.weight.shape)
        self.layer.weight = nn.Parameter(torch.tensor(drawn, dtype=torch.float32))


class Idle(Network):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.idle = nn.Parameter(torch.zeros(3))


class Centred(Network):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(dim=0))


class Noisy(Network):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand_like(x))


class Infinite(Network):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 0


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
    name: str = "speaks"

    def explain(
        self, model: ExplainedModel, data: ExplainedData, inputs: Inputs, rng: np.random.Generator
    ) -> Explanation:
        return self.say(model.as_network(), rng)

    def say(self, network: nn.Module, rng: np.random.Generator) -> Said:
        return Said(str(rng.integers(100)))


class Babbles(Speaks):
    def say(self, network: nn.Module, rng: np.random.Generator) -> Said:
        return Said(str(np.random.default_rng().random()))


class Empty(Speaks):
    def say(self, network: nn.Module, rng: np.random.Generator) -> Said:
        return Said("", ())


class Lists(Speaks):
    def say(self, network: nn.Module, rng: np.random.Generator) -> Said:
        return Said("", ({"words": ["a"]},))


class Promises(Speaks):
    def say(self, network: nn.Module, rng: np.random.Generator) -> Said:
        return Said("", pictures=("picture.png",))


class Trains(Speaks):
    def say(self, network: nn.Module, rng: np.random.Generator) -> Said:
        network.train()
        return Said("")


class Spoils(Speaks):
    def say(self, network: nn.Module, rng: np.random.Generator) -> Said:
        with torch.no_grad():
            next(network.parameters()).add_(1)
        return Said("")


class Draws(Speaks):
    def say(self, network: nn.Module, rng: np.random.Generator) -> Said:
        torch.rand(1)
        return Said("")
