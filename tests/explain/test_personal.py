"""`fedsim explain` of XPFL: a personal model as a tree, and its features in the plane."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import Say, small_experiment

from fedsim import Run, run
from fedsim.errors import BadInput
from fedsim.explained import PersonalModel
from fedsim.remade import reopen

XFED = {"images": 60, "perplexity": 5, "iterations": 300, "held_out": 0.25}


def personal(out: Path, **sections: Any) -> Run:
    method = {"name": "xpfl", "lam": 0, "xfed": XFED}
    sections = {"method": method, "train": {"rounds": 3}, **sections}
    return run(small_experiment(**sections), out)


def test_the_tree_mimics_the_clients_own_model(tmp_path: Path) -> None:
    done = personal(tmp_path)
    personal_model = PersonalModel.of(done, 2)
    found = personal_model.mimic
    again = reopen(done)
    own = again.fed.fetch(again.fed.states()[2])["weights"]
    again.fed.model.load(torch.tensor(own))
    with torch.no_grad():
        images = torch.tensor(found.images).view(-1, *personal_model.shape)
        predicted = again.fed.model.module(images).argmax(dim=1)
    np.testing.assert_array_equal(found.predicted, predicted)
    assert (len(found.images), found.known) == (60, 45)
    agree = found.tree.predict(found.images[:45]) == found.predicted[:45]
    assert agree.mean() > 0.9
    held = torch.tensor(again.dataset.x[again.holdings.train[2]]).flatten(1)
    assert all((held == row).all(dim=1).any() for row in torch.tensor(found.images))


def test_in_words_and_in_pictures(say: Say) -> None:
    done = personal(Path("runs"))
    code, text, _ = say("explain", str(done.path), "--client", "1", "--client", "4")
    assert code == 0
    for k in (1, 4):
        assert PersonalModel.of(done, k).in_words() in text
        for name in ("tree", "confusion", "embedding"):
            picture = done.path / "explanations" / f"{name}-{k}.png"
            assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_there_is_not(say: Say) -> None:
    done = personal(Path("runs"), train={"rounds": 1, "participation": 0.1})
    (here,) = done.clients["client"].unique()
    code, _, error = say("explain", str(done.path), "--client", str((here + 1) % 10))
    assert code == 2
    assert f"client {(here + 1) % 10} was in no cohort, and has no personal model" in error
    code, _, error = say("explain", str(done.path), "--client", "10")
    assert (code, error) == (2, "error: there is no client 10; there are 10, counted from 0\n")
    code, _, error = say("explain", str(done.path), "--row", "1")
    assert error == "error: --row and --npy explain rules; this run made personal models\n"
    plain = personal(Path("runs"), method={"name": "fedavg"})
    with pytest.raises(BadInput, match="fedavg has no personal models"):
        PersonalModel.of(plain, 0)
