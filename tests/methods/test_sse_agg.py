"""SSE-AGG against its formulas, written out, and what it makes of clients that disagree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from by_hand import ByHand, close
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch.nn.functional import cross_entropy

from experiments import FOUR, TABLE, Finish, small_experiment
from fedsim.methods.sse_agg import clustered, common_sketch, mean_distance
from fedsim.support.rng import keyed_rng

SMALL: dict[str, Any] = {
    "data": TABLE,
    "partition": {**FOUR, "server_fraction": 0.1},
    "model": {"name": "mlp", "hidden": [4]},
    "train": {"rounds": 2, "batch_size": 8},
}


def test_a_round_is_its_formula() -> None:
    method = {"name": "sse_agg", "beta": 4.0, "clusters": 2}
    hand = ByHand(small_experiment(**SMALL, method=method))
    _, _, after, _ = next(hand.rounds())
    models = [hand.trained(hand.initial, 1, k) for k in range(4)]
    x, y = hand.fed.server.own_data.x.double(), hand.fed.server.own_data.y
    order = keyed_rng(hand.experiment.seed, "server/order", 1).permutation(len(x))
    sketches = []
    for w in models:
        network, rises = hand.network(w), []
        with torch.no_grad():
            whole = float(cross_entropy(network(x), y))
            for feature in range(6):
                dealt = x.clone()
                dealt[:, feature] = x[order, feature]
                rises.append(float(cross_entropy(network(dealt), y)) - whole)
        sketches.append(np.array(rises) / np.linalg.norm(rises))
    cluster = clustered([(w - hand.initial).numpy() for w in models], 2)
    means = [
        np.mean([s for s, c in zip(sketches, cluster, strict=True) if c == wanted], axis=0)
        for wanted in set(cluster)
    ]
    consensus = sum(means) / len(means)
    a = [np.exp(-4.0 * np.sqrt(((s - consensus) ** 2).sum())) for s in sketches]
    close(after.weights, hand.mean(models, hand.n * np.array(a)))
    close(after.consensus, consensus, 1e-4)


class TestClusters:
    @given(arrays(np.float32, (6, 3), elements=st.floats(-3, 3, width=32)), st.integers(1, 6))
    def test_no_more_than_asked_for(self, updates: np.ndarray, clusters: int) -> None:
        found = clustered(list(updates), clusters)
        assert found.shape == (6,)
        assert 1 <= len(set(found)) <= clusters

    def test_updates_of_one_direction_are_together_however_long(self) -> None:
        a, b = np.array([1.0, 0.1, 0]), np.array([0, 0.1, 1.0])
        found = clustered([a, 5 * a, b, 0.1 * b, 3 * a], 2)
        assert found[0] == found[1] == found[4] != found[2] == found[3]

    def test_one_client_or_none(self) -> None:
        assert clustered([], 2).tolist() == []
        assert clustered([np.ones(3)], 2).tolist() == [1]


class TestConsensus:
    def test_many_alike_do_not_make_it_alone(self) -> None:
        sketches = np.array([[1.0, 0], [1, 0], [1, 0], [0, 1]])
        assert common_sketch(sketches, np.array([1, 1, 1, 2])).tolist() == [0.5, 0.5]
        assert common_sketch(sketches, np.array([1, 1, 1, 1])).tolist() == [0.75, 0.25]

    def test_of_nobody_it_is_zero(self) -> None:
        assert common_sketch(np.zeros((0, 2)), np.zeros(0, np.int64)).tolist() == [0, 0]
        assert mean_distance(np.zeros((1, 2))) == 0

    def test_distance_of_pairs(self) -> None:
        assert mean_distance(np.array([[0.0, 0], [3, 4], [0, 0]])) == pytest.approx(10 / 3)


def test_inputs_may_have_two_axes(finish: Finish) -> None:
    """Each entry is a group: no row of images, and no table."""
    flat, square = (
        finish(**{**SMALL, "data": {**TABLE, "shape": shape}}, method={"name": "sse_agg"})
        for shape in ([6], [2, 3])
    )
    assert square.rounds["sketch_distance"].tolist() == flat.rounds["sketch_distance"].tolist()
    assert np.allclose(flat.own_explanations.groupby("round")["share"].sum(), 1)
