"""How far are SHAP values over clients' centres from those over the pooled training examples?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from tables import finished, spread, table

from fedsim import Grid, Run
from fedsim.analysis.replay import ModelSnapshot
from fedsim.explain.baselines import Backgrounds, Compared
from fedsim.explain.explainers import explainers
from fedsim.results.significance import holm, paired, shown_p
from fedsim.support.rng import keyed_rng
from fedsim.training import logits

AXIS = "partition.alpha"
OF = {"table": ("kernel_shap",), "digits": ("deep_shap",)}
SIZES = (1, 4, 16, 64)
INPUTS, CLIENTS = 6, 2
TESTED = 16  # m of what is tested
COMPARED = (("clients", "own"), ("clients", "train"), ("gap", "draw"))
LABELS = {
    "own": "m of a client's own examples",
    "train": "m of all clients' examples",
    "pooled": "m centres of all examples",
    "clients": "m centres that clients send",
    "gap": "clients' centres, from pooled ones",
    "draw": "pooled centres, from another draw",
}


def rows(found: list[Grid]) -> pd.DataFrame:
    """A row for each run and explainer, with the distance from the whole training set's values.

    Distances are |R − R'| / |R'|, averaged over inputs, as of the score `background_gap`.
    """
    rows = []
    for cell, run in finished(found):
        about = {**cell, "hash": run.result_hash, "accuracy": run.rounds["accuracy"].iloc[-1]}
        rows += [about | {"explainer": name} | distances(run, name) for name in OF[cell["data"]]]
    return pd.DataFrame(rows)


def distances(run: Run, name: str) -> dict[str, float]:
    """Of an explainer's values of the global model's decisions, by background."""
    snapshot = ModelSnapshot.of(run)
    model, plain = snapshot.explained(), snapshot.data()
    assert model.network is not None
    assert plain.splits is not None
    splits, dataset = plain.splits, plain.dataset
    rows = keyed_rng(model.seed, "background").permutation(len(dataset.test_x))[:INPUTS]
    x = plain.prepare(dataset.test_x[np.sort(rows)])
    decided = torch.from_numpy(logits(model.network, x)).argmax(dim=1)

    def over(baseline: Any) -> Compared:
        explainer = explainers.parse({"name": name, "baseline": baseline})
        assert isinstance(explainer, Compared)
        return explainer

    def values(
        explainer: Compared,
        seed: int = model.seed,
        own: NDArray[Any] | None = None,
    ) -> NDArray[np.float64]:
        """(INPUTS, P); the seed is that of the background."""
        data = replace(plain, own=own, backgrounds={})
        drawn, rng = replace(model, seed=seed), explainer.rng(model.seed)
        found = explainer.each(drawn, data, x, decided, rng)
        return found.reshape(INPUTS, -1).astype(np.float64)

    def away(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
        return float(np.mean(np.linalg.norm(one - other, axis=1) / np.linalg.norm(other, axis=1)))

    everything = {"train": len(np.unique(splits.train.values))}
    whole = values(over(everything))
    found = {usual: away(values(over(usual)), whole) for usual in ("zero", "mean")}
    for m in SIZES:
        examples, sent = over({"train": m}), over({"clients": m})
        pooled = sent.pooled()
        assert pooled is not None
        own = [dataset.x[splits.train[k]] for k in range(CLIENTS)]
        found[f"own {m}"] = float(
            np.mean([away(values(examples, own=held), whole) for held in own])
        )
        found[f"train {m}"] = away(values(examples), whole)
        all_sent = Backgrounds().joined(sent, model, replace(plain, backgrounds={}), False)
        found |= {f"bytes {m}": all_sent.sent, f"examples sent {m}": len(all_sent.whole)}
        if m == 1:  # one centre is the mean
            continue
        of_sent, of_pooled = values(sent), values(pooled)
        found[f"pooled {m}"] = away(of_pooled, whole)
        found[f"clients {m}"] = away(of_sent, whole)
        found[f"gap {m}"] = away(of_sent, of_pooled)
        found[f"draw {m}"] = away(of_pooled, values(pooled, seed=model.seed + 1000))
    return found


def tables(results: pd.DataFrame) -> Iterator[str]:
    for (data, explainer), of_data in results.groupby(["data", "explainer"], sort=False):
        for alpha, own in of_data.groupby(AXIS, sort=False):
            none = pd.Series(dtype=float)
            usual = ", ".join(f"{c} {spread(own[c])}" for c in ("zero", "mean"))
            about = (
                f"{data}, {explainer}, α = {alpha:g}: {usual}; accuracy {spread(own['accuracy'])}"
            )
            body = [
                [label, *(spread(own.get(f"{kind} {m}", none)) for m in SIZES)]
                for kind, label in LABELS.items()
            ]
            for kind in ("bytes", "examples sent"):
                body.append([kind, *(f"{own[f'{kind} {m}'].mean():.1f}" for m in SIZES)])
            yield f"\n{about}\n\n" + table(["", *(f"m = {m}" for m in SIZES)], body)
        pairs = {
            (one, other, alpha): paired(own[f"{one} {TESTED}"], own[f"{other} {TESTED}"])
            for one, other in COMPARED
            for alpha, own in of_data.set_index("seed").groupby(AXIS, sort=False)
        }
        ps = dict(zip(pairs, holm(each.p() for each in pairs.values()), strict=True))
        body = [
            [f"{one} − {other}, α = {alpha:g}", str(each), shown_p(ps[one, other, alpha])]
            for (one, other, alpha), each in pairs.items()
        ]
        header = [f"{data}, {explainer}, m = {TESTED}", "difference", "p by Holm"]
        yield "\n" + table(header, body)
