"""Components as a user would write them, outside the package and without a change within it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from fedsim import Client, Federation, Method, State
from fedsim.data import Dataset, Source
from fedsim.federation import NothingToReduce, Reduction
from fedsim.federation.wire import to_arrays
from fedsim.methods.learns import Learns
from fedsim.objectives import Batch, Metric, Objective, Totals

TAGS = ("round", "red", "heavy")


class Tagged(Source):
    """Vectors with several tags each: a tag is where a random direction points."""

    name: str = "own_components:Tagged"
    samples: int = 300

    def load(self) -> Dataset:
        rng = np.random.default_rng(0)
        directions = rng.standard_normal((8, len(TAGS)))
        x = rng.standard_normal((self.samples + 120, 8)).astype(np.float32)
        y = (x @ directions > 0).astype(np.float64)
        n = self.samples
        return Dataset(x[:n], y[:n], x[n:], y[n:], classes=())


class MultiLabel(Objective):
    """Binary cross-entropy of several labels; macro F1, AUROC, accuracy by tag, calibration."""

    name: str = "own_components:MultiLabel"

    def num_outputs(self, data: Dataset) -> int:
        return int(data.y.shape[1])

    def metrics(self, data: Dataset) -> tuple[Metric, ...]:
        return (
            Metric("macro_f1", "macro F1", primary=True),
            Metric("auroc", "AUROC"),
            Metric("calibration", "expected calibration error", best="min"),
            *(Metric(f"accuracy/{tag}", f"accuracy of {tag}") for tag in TAGS),
        )

    def loss(
        self, network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]
    ) -> Tensor:
        return binary_cross_entropy_with_logits(network(x), y, reduction="none").mean(dim=1)

    def totals(self, outputs: Tensor, batch: Batch) -> Totals:
        right = (outputs > 0) == (batch.y > 0.5)
        by_tag = {f"right/{tag}": int(right[:, k].sum()) for k, tag in enumerate(TAGS)}
        found, y = outputs.sigmoid().cpu().numpy(), batch.y.cpu().numpy()
        return {"n": len(batch), **by_tag, "probabilities": found, "labels": y}

    def scores(self, totals: Totals) -> dict[str, float]:
        p, y = totals["probabilities"], totals["labels"].astype(int)
        bins = np.minimum((p * 10).astype(int), 9)
        gaps = [abs((p - y)[bins == b].sum()) for b in range(10)]
        return {
            "macro_f1": float(f1_score(y, p > 0.5, average="macro")),
            "auroc": float(roc_auc_score(y, p)),
            "calibration": float(sum(gaps) / p.size),
            **{f"accuracy/{tag}": totals[f"right/{tag}"] / totals["n"] for tag in TAGS},
        }


class CoordinateMedian(Reduction):
    """The median of each coordinate of the clients' vectors (Yin et al., ICML 2018)."""

    def __init__(self) -> None:
        self.sent: dict[int, Any] = {}

    def fold(self, id: int, message: Any, arguments: Mapping[str, Any]) -> None:
        self.sent[id] = to_arrays(message)

    def merge(self, other: CoordinateMedian) -> None:
        self.sent.update(other.sent)

    def result(self, arguments: Mapping[str, Any], failures: Mapping[int, str]) -> Any:
        if not self.sent:
            raise NothingToReduce("no client of the cohort sent a vector")
        return np.median([self.sent[k] for k in sorted(self.sent)], axis=0).astype(np.float32)


class FedMedian(Method[State]):
    name: str = "own_components:FedMedian"
    learns: ClassVar[Learns] = Learns(objectives=(Objective,), asks=("messages",), averages=False)

    def init(self, fed: Federation) -> State:
        return State(weights=fed.initial_weights())

    def round(self, fed: Federation, state: State, t: int) -> State:
        cohort, median = fed.sample(t), CoordinateMedian()
        weights = fed.reduce(self.local_update, cohort, median, weights=state.weights)
        return replace(state, weights=weights)

    def local_update(self, client: Client, weights: torch.Tensor) -> Tensor:
        return client.train(weights)


class Only(FedMedian):
    """A cohort of one client."""

    name: str = "own_components:Only"
    client: int = 0

    def round(self, fed: Federation, state: State, t: int) -> State:
        median = CoordinateMedian()
        sent = fed.reduce(self.local_update, [self.client], median, weights=state.weights)
        return replace(state, weights=sent)


class Broken(FedMedian):
    """Client 2 sends NaN."""

    name: str = "own_components:Broken"

    def local_update(self, client: Client, weights: torch.Tensor) -> Tensor:
        return weights * (np.nan if client.id == 2 else 1.0)
