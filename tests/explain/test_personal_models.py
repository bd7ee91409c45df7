"""`fedsim explain` of XPFL: a personal model as a tree, and its features in the plane."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from experiments import WHOLE, Say, ran
from fedsim import Run
from fedsim.analysis.replay import ModelSnapshot, replay

XFED = {"images": 60, "perplexity": 5, "iterations": 300, "held_out": 0.25}


def personal(**sections: Any) -> Run:
    method = {"name": "xpfl", "lam": 0, "xfed": XFED}
    return ran(**{"data": WHOLE, "method": method, "train": {"rounds": 3}, **sections})


def mimicked(done: Run, client: int) -> Any:
    return ModelSnapshot.of(done, client).explain(done.experiment.method.explainer())


def test_the_tree_mimics_the_clients_own_model(say: Say) -> None:
    done = personal()
    found = mimicked(done, 2).mimic
    again = replay(done)
    own = again.runner.fetch(again.runner.states()[2])["weights"]
    again.fed.server.model.load(torch.tensor(own))
    with torch.no_grad():
        images = torch.tensor(found.images).view(-1, *again.dataset.shape)
        predicted = again.fed.server.model.module(images).argmax(dim=1)
    np.testing.assert_array_equal(found.predicted, predicted)
    assert (len(found.images), found.known) == (60, 45)
    agree = found.tree.predict(found.images[:45]) == found.predicted[:45]
    assert agree.mean() > 0.9
    held = torch.tensor(again.dataset.x[again.splits.train[2]]).flatten(1)
    assert all((held == row).all(dim=1).any() for row in torch.tensor(found.images))
    text = say.printed("explain", str(done.path), "--client", "1", "--client", "4")
    for k in (1, 4):
        assert mimicked(done, k).text() in text
        for name in ("tree", "confusion", "embedding"):
            picture = done.path / "explanations" / f"{name}-client-{k}-round-3.png"
            assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_there_is_not(say: Say) -> None:
    done = personal(train={"rounds": 1, "participation": 0.1})
    (here,) = done.clients["client"].unique()
    other = (here + 1) % 10
    # It would predict with the global model.
    text = say.printed("explain", str(done.path), "--client", str(other))
    assert text.startswith(f"client {other}'s personal model after round 1")
    error = say.refused("explain", str(done.path), "--client", str(other), "--of", "cohort")
    assert error == f"error: client {other} was not trained in any round\n"
    error = say.refused("explain", str(done.path), "--row", "1")
    assert "explainer tree takes none: a surrogate decision tree" in error


def test_a_tree_of_any_classifier(say: Say) -> None:
    done = personal(method={"name": "fedavg"})
    for words, title in [
        ([], "the global model after round 3: a tree of "),
        (["--client", "1", "--round", "2"], "client 1's model after round 2: a tree of "),
    ]:
        tree = "tree: {iterations: 300, images: 100}"
        text = say.printed("explain", str(done.path), "--explainer", tree, *words)
        assert text.startswith(title)
    for name in ("tree-round-3", "embedding-client-1-round-2"):
        assert (done.path / "explanations" / f"{name}.png").exists()
