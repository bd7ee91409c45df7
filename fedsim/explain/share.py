"""Explanations that clients send: scaled and noisy, aggregated by the server, or poisoned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from pydantic import Field

from fedsim.config.registry import Config
from fedsim.explain.groups import unit
from fedsim.explain.scores.relevance import Scores, mean_defined
from fedsim.support.rng import keyed_rng

Relevances = NDArray[np.float64]
POISON = -10  # factor of poisoned maps
QUALITY = ("insertion", "deletion")  # scores whose difference is the quality of an explanation


class Share(Config):
    """How clients send their explanations, and how the server aggregates them.

    Each explained client sends its maps of the common inputs with its update: they take bytes,
    time and energy, and are lost with it. The server's aggregate serves as the explanation of the
    global model and is scored as one: rows of explanations.parquet with the model `shared`, and
    columns `<explainer>/shared_<score>`; none if no client counts. `privacy` does not cover shared
    explanations and cannot be combined with them, unless they have noise.

    Noise makes them differentially private: whatever a client's data, each of its maps has a
    length of 1 at most, so that another data set moves it by 2 at most. By its noisy maps of all
    inputs, explainers and rounds, nobody can tell what data the client has, not even the server,
    up to (ε, δ). ε is the column `explain_epsilon` of clients.parquet; in rounds.parquet, it is
    that of the client that has sent the most. It covers these maps alone: not the updates beside
    them (`privacy`), nor the explanations and scores on record, which have no noise. As with
    `privacy`, who knows the experiment's seed can remove the noise.

    Args:
        aggregation: `mean` of the maps; `quality`, a mean in which each client is weighted by the
            area under its insertion curve minus the area under its deletion curve, if that is
            above 0 (our reading of iFLASH, of which only the abstract was available: contributions
            weighted by their faithfulness); or `median` of each part, which a minority of clients
            cannot move far.
        noise: length of the Gaussian noise that is added to each map after scaling it to unit L2
            norm, relative to the map's length; see `obscured`. By default maps are sent unchanged.
        delta: δ, for which ε is stated.
        poisoned: share of all clients that send false explanations: each map with its sign
            flipped, so that evidence for a decision becomes evidence against it, and ten times as
            long (which scaling undoes), with the claim to be of the best quality.
    """

    aggregation: Literal["mean", "quality", "median"] = "mean"
    noise: float | None = Field(None, ge=0)
    delta: float = Field(1e-5, gt=0, lt=1)
    poisoned: float = Field(0.0, ge=0, le=1)

    def poisoners(self, count: int, seed: int) -> frozenset[int]:
        order = keyed_rng(seed, "explain/poisoned").permutation(count)
        return frozenset(order[: round(self.poisoned * count)].tolist())

    def sent(
        self,
        relevance: NDArray[np.floating],
        present: NDArray[np.bool_],
        poisoned: bool,
        rng: Generator,
    ) -> Relevances:
        """(m, P) what a client sends for its maps (m, P), given which parts exist (m, P).

        With noise a map that is not finite is sent as one of zeros: to send none would tell of the
        client's data.
        """
        maps = relevance.astype(np.float64) * (POISON if poisoned else 1)
        if self.noise is None:
            return maps
        if self.noise:
            maps = np.where(np.isfinite(maps).all(axis=1, keepdims=True), maps, 0)
        return obscured(maps, present, self.noise, rng)

    @property
    def states_epsilon(self) -> bool:
        """Whether all that clients send of their explanations has noise."""
        return self.noise is not None and self.aggregation != "quality"

    def size(self, present: NDArray[np.bool_]) -> int:
        """The bytes of a client's maps, given which parts exist (m, P): 32-bit floats."""
        return 4 * int(present.sum())

    def quality(self, scores: Mapping[str, Scores], poisoned: bool) -> float:
        """The quality that a client claims for its explanation; 0 if it is not used."""
        if self.aggregation != "quality":
            return 0.0
        if poisoned:
            return 1.0
        more, less = (mean_defined(scores[name]) or 0.0 for name in QUALITY)
        return more - less

    def aggregate(
        self, sent: Mapping[int, Relevances], quality: Mapping[int, float]
    ) -> Relevances | None:
        """(m, P) the server's aggregate of clients' maps (m, P); None if no client counts."""
        clients = sorted(sent)
        if not clients:
            return None
        maps = np.stack([sent[k] for k in clients])
        if self.aggregation == "median":
            return np.median(maps, axis=0)
        weights = np.ones(len(clients))
        if self.aggregation == "quality":
            weights = np.array([max(0.0, quality[k]) for k in clients])
            if not weights.any():
                return None
        found: Relevances = np.tensordot(weights / weights.sum(), maps, axes=1)
        return found


def obscured(
    relevance: Relevances, present: NDArray[np.bool_], noise: float, rng: Generator
) -> Relevances:
    """(m, P) maps of unit L2 norm, plus noise · N(0, 1)/√n on each of the n existing parts.

    A noise of 1 is about as long as the map. A map of zeros stays one before noise, and parts that
    an input lacks stay 0.
    """
    parts = np.maximum(present.sum(axis=1, keepdims=True), 1)
    drawn = rng.standard_normal(relevance.shape) / np.sqrt(parts)
    return np.where(present, unit(np.where(present, relevance, 0)) + noise * drawn, 0)
