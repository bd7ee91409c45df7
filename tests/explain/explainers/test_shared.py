"""`fedsim explain` of FedXDS: what clients shared, in pictures, and what the noise promises."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments import Say, ran, refusal
from fedsim import Run
from fedsim.analysis.replay import explain_run, replay
from fedsim.explain.explainers.shared_images import SharedImagesExplainer
from fedsim.explain.masking import keep_relevant
from fedsim.methods.shared.pool import pixel_range

METHOD: dict[str, Any] = {"name": "fedxds", "warmup_rounds": 1, "removed": 75}
MODEL = {"name": "cnn", "channels": [4, 4]}


def shared(**sections: Any) -> Run:
    usual = {"method": METHOD, "model": MODEL, "train": {"rounds": 3}}
    return ran(**{**usual, **sections})


def shown(done: Run, clients: Sequence[int]) -> Any:
    return explain_run(done, SharedImagesExplainer(), clients)


@pytest.mark.parametrize(
    "fields",
    [{}, {"fraction": 0.5}, {"attribute_with": "local"}, {"attribution": {"name": "random"}}],
)
def test_what_is_shown_is_what_was_shared(fields: dict[str, Any]) -> None:
    beside = {"explainers": ["random"], "inputs": 2, "scores": ["sparseness"]}
    done = shared(method={**METHOD, **fields}, explain=beside)
    again = replay(done)
    found = shown(done, range(10))
    assert found.pool.sum() == len(again.state.labels)
    np.testing.assert_array_equal(
        found.pool.sum(axis=0), np.bincount(again.state.labels, minlength=10)
    )
    told = [[int(row[str(c)] or 0) for c in range(10)] for row in found.rows()]
    np.testing.assert_array_equal(told, found.pool)
    zero, one = pixel_range(again.fed)
    pool = (again.state.shared - zero) / (one - zero)
    ends = np.cumsum(found.pool.sum(axis=1))
    for e in found.examples:
        of_client = slice(ends[e.client] - found.pool[e.client].sum(), ends[e.client])
        own = pool[of_client][again.state.labels[of_client] == e.label]
        np.testing.assert_array_equal(e.shared, own[0])
        held = again.dataset.x[again.splits.train[e.client]]
        assert (np.abs(held - e.held).reshape(len(held), -1).max(axis=1) < 1e-6).any()
        kept = keep_relevant(torch.from_numpy(e.heatmap)[None], 75)[0].numpy()
        np.testing.assert_array_equal(e.mask, kept)
    assert len(found.examples) == (found.pool > 0).sum()


def test_a_client_without_a_class_shares_nothing_of_it(tmp_path: Path) -> None:
    partition = {"kind": "pathological", "clients": 10, "classes_per_client": 1}
    done = shared(partition=partition)
    found = shown(done, [0, 3])
    assert ((found.pool > 0).sum(axis=1) == 1).all()
    assert [e.client for e in found.examples] == [0, 3]
    assert found.save(tmp_path)[0].stat().st_size > 5000


def test_in_words_and_in_pictures(say: Say) -> None:
    done = shared()
    text = say.printed("explain", str(done.path), "--client", "2", "--client", "0")
    images = len(replay(done).state.labels)
    assert f"{images} images are shared; the least relevant 75 % of each image's pixels (" in text
    assert "at a Euclidean distance of 1, ε = 49.88 (analytic calibration)" in text
    assert "The mask depends on the image" in text
    for name in ("shared_images-clients-0-2", "pool"):
        assert (done.path / "explanations" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    text = say.printed("explain", str(shared(method={**METHOD, "sigma": 0.0}).path))
    assert "there is no noise (σ = 0): nothing is guaranteed" in text


def test_clients_that_shared_nothing() -> None:
    partition = {"kind": "dirichlet", "clients": 10, "alpha": 0.1, "min_samples": 1}
    done = shared(partition=partition, method={**METHOD, "fraction": 0.01})
    pool = shown(done, range(10)).pool
    empty = np.flatnonzero(pool.sum(axis=1) == 0).tolist()
    assert 0 < len(empty) < 10
    assert "none of these clients shared an image" in refusal(lambda: shown(done, empty))


def test_colours_of_other_numbers_are_drawn_grey(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.random((60, 2, 8, 8), dtype=np.float32), np.arange(60) % 2
    np.savez(tmp_path / "two.npz", x=x, y=y)
    data = {"name": "npz", "path": str(tmp_path / "two.npz")}
    done = shared(data=data, partition={"kind": "iid", "clients": 2})
    assert shown(done, [1, 1]).save(tmp_path)[0].exists()


def test_nothing_shared() -> None:
    done = shared(method={**METHOD, "fraction": 0.0})
    told = refusal(lambda: shown(done, [0]))
    assert "nothing was shared (method.fraction=0)" in told
