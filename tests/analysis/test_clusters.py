"""Clusters of relevance maps over clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import hypergeom
from sklearn.metrics import adjusted_rand_score, homogeneity_score

from experiments import KINDS, Say, by_day, examples, ran
from fedsim import Run, clusters
from fedsim.analysis.clusters import LEVEL, _members, spectral

PLANTED: dict[str, Any] = {
    "data": {"name": "shortcut", "of": {"name": "digits"}, "clients": 0.2, "strength": 1.0},
    "partition": {"kind": "iid", "clients": 5},
    "model": {"name": "mlp", "hidden": [64]},
    "train": {"rounds": 10, "local_epochs": 2, "batch_size": 16, "optimizer": {"lr": 0.1}},
}


@pytest.fixture(scope="module")
def planted() -> Run:
    return ran(**PLANTED)


def blobs(sizes: list[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng, truth = np.random.default_rng(seed), np.repeat(np.arange(len(sizes)), sizes)
    return 100 * np.eye(len(sizes), 8)[truth] + rng.normal(size=(len(truth), 8)), truth


@examples(30)
@given(st.lists(st.integers(20, 40), min_size=2, max_size=5), st.integers(0, 99))
def test_no_cluster_mixes_groups_far_apart(sizes: list[int], seed: int) -> None:
    vectors, truth = blobs(sizes, seed)
    found, gap = spectral(vectors, most=8)
    assert homogeneity_score(truth, found) == pytest.approx(1)
    assert 0 < gap <= 1
    count = np.bincount(found)
    assert (np.diff(count) <= 0).all()  # the largest first
    order = np.random.default_rng(seed).permutation(len(truth))
    assert adjusted_rand_score(found[order], spectral(vectors[order], most=8)[0]) == 1


def test_nobody_is_named_whose_maps_are_as_all_others() -> None:
    for seed in range(20):
        clients = np.random.default_rng(seed).permutation(np.arange(80) % 8)
        maps = pd.DataFrame({"label": 0, "client": clients, "cluster": blobs([30, 30, 20], 0)[1]})
        members = _members(maps, 8)
        assert len(members) == 3 * 8
        assert (members["p_value"] * len(members) >= LEVEL).all()


class TestPlanted:
    def test_the_client_with_the_shortcut_is_named(self, planted: Run) -> None:
        found = clusters(planted, "integrated_gradients", inputs=28, progress=False)
        holders = planted.experiment.data.holders(5, planted.experiment.seed).tolist()
        assert found.named == holders
        assert found.scores["precision"] == found.scores["recall"] == 1
        assert f"client {holders[0]}; rand index" in found.text()
        has = found.maps[found.maps["planted"]]
        assert set(has["client"]) == set(holders)

    def test_counts_and_chances(self, planted: Run) -> None:
        found = clusters(planted, "gradient", inputs=6, progress=False)
        assert len(found.maps) == 5 * 10 * 6 == found.members["maps"].sum() == len(found.relevance)
        label = found.classes["label"][found.classes["clusters"].argmax()]
        maps = found.maps[found.maps["label"] == label]
        of = found.members[(found.members["label"] == label) & (found.members["cluster"] == 0)]
        for row in of.itertuples():
            own, size = maps[maps["client"] == row.client], (maps["cluster"] == 0).sum()
            assert row.maps == (own["cluster"] == 0).sum()
            assert row.expected == pytest.approx(size * len(own) / len(maps))
            chance = hypergeom(len(maps), len(own), size).sf(row.maps - 1)
            assert row.p_value == pytest.approx(chance)
        rand = found.classes.set_index("label")["rand_index"]
        assert rand[label] == adjusted_rand_score(maps["planted"], maps["cluster"])

    def test_the_same_again(self, planted: Run) -> None:
        once, twice = (clusters(planted, "gradient", inputs=4, progress=False) for _ in range(2))
        assert once.maps.equals(twice.maps)
        assert once.members.equals(twice.members)

        own = clusters(planted, "gradient", of="cohort", after=10, inputs=4, progress=False)
        assert "explained by their own models" in own.title

    def test_the_command(self, planted: Run, tmp_path: Path, say: Say) -> None:
        asked = ("--explainer", "gradient", "--inputs", "4", "--out", "there")
        said = say.printed("clusters", str(planted.path), *asked)
        assert "explained by the global model after round 10, gradient: 200 maps" in said
        assert (tmp_path / "there" / "clusters-gradient-round-10.png").stat().st_size > 1000


OTHERS = {
    "documents": "classes",
    "numbers": "80 maps",
    "local": "explained by their own models",
    "trees": "3 classes",
}


@pytest.mark.parametrize("kind", by_day(OTHERS, ("documents", "trees")))
def test_other_data_and_models(kind: str) -> None:
    sections = dict(KINDS.get(kind, {"method": {"name": kind}}))
    if kind == "documents":
        sections["data"] = {"name": "planted_reviews", "reviews": 60}
    done = ran(**sections, train={"rounds": 2})
    found = clusters(done, inputs=20, progress=False)
    assert OTHERS[kind] in found.text()
    assert not found.scores
    (path,) = found.save()
    assert path.parent == done.path / "explanations"
