"""W2: who made the model believe the tag? python decision.py [--out runs]

Writes results/decision.csv (a row for each client, image and run) and results/decision_runs.csv (a
row for each client of a run) beside this file, and prints the tables of the README. Runs that are
in the files are not run again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

sys.path.insert(0, str(Path(__file__).parents[1]))
from tables import spread, table

import fedsim
from fedsim.analysis.replay import ModelSnapshot
from fedsim.data import Dataset
from fedsim.data.sources.shortcut import NAME, Shortcut
from fedsim.results.significance import holm, paired, shown_p

HERE = Path(__file__).parent
RESULTS = HERE / "results"
IMAGES, RUNS = RESULTS / "decision.csv", RESULTS / "decision_runs.csv"
SEEDS = range(10)
CLIENTS, MOST = 8, 8  # clients, and images of a run
MASS = "integrated_gradients/relevance_mass_shortcut"
SCORES = {
    "accuracy": "accuracy/absent",
    "accuracy_against": "accuracy/against",
    "relevance": MASS,
}


def fooled(run: fedsim.Run) -> list[tuple[int, int]]:
    """Test images that the model gets right, and with another class's tag takes for that class.

    With the tag, and without it, as rows of the test set.
    """
    snapshot = ModelSnapshot.of(run)
    data = snapshot.dataset
    predicted = snapshot.network()(snapshot.data().prepare(data.test_x)).argmax(dim=1).numpy()
    against, absent = (np.flatnonzero(data.test_columns[NAME] == v) for v in ("against", "absent"))
    right = predicted[absent] == data.test_y[absent]
    taken = predicted[against] == _tags(data)[against]
    return list(zip(against[right & taken].tolist(), absent[right & taken].tolist(), strict=True))


def _tags(data: Dataset) -> NDArray[np.int64]:
    """(M,) the class whose tag each test image has; -1 for none."""
    where, aligned = data.truth[NAME], data.test_columns[NAME] == "aligned"
    found = np.full(len(where), -1)
    for c in range(len(data.classes)):
        (first, *_) = np.flatnonzero(aligned & (data.test_y == c))
        found[(where == where[first]).all(axis=(1, 2))] = c
    return found


def on_images(run: fedsim.Run, holders: NDArray[np.int64], seed: int) -> list[dict[str, Any]]:
    """Each client's influence on decisions about images with the tag, and without it."""
    images, rows = fooled(run), []
    chosen = np.random.default_rng([seed, 52]).permutation(len(images))[:MOST]
    for image in sorted(chosen.tolist()):
        for variant, row in zip(("against", "absent"), images[image], strict=True):
            found = fedsim.influence(run, row, progress=False)
            tag = found.dataset.truth[NAME][images[image][0]].ravel()
            for one in found.clients.to_dict("records"):
                k = one["client"]
                shares = [_share(found.maps[whose], tag) for whose in (None, k)]
                rows.append(
                    {
                        "seed": seed,
                        "row": row,
                        "variant": variant,
                        "client": k,
                        "holder": k in holders,
                        "influence": one["influence"],
                        "estimate": one["estimate"],
                        "tag_share": shares[0],
                        "tag_fall": shares[0] - shares[1],
                        "changed": one["decision"] != found.decision,
                    }
                )
    return rows


def _share(relevances: NDArray[np.float64], tag: NDArray[np.bool_]) -> float:
    """Of all relevance, in size, that of the pixels of the tag."""
    sizes = np.abs(relevances)
    return float(sizes[tag].sum() / sizes.sum()) if sizes.any() else 0.0


def on_runs(run: fedsim.Run, holders: NDArray[np.int64], seed: int) -> list[dict[str, Any]]:
    """Each client's contribution to scores of the run."""
    columns = {"holder": {k: k in holders for k in range(CLIENTS)}}
    for name, score in SCORES.items():
        for how in ("shapley", "leave_one_out"):
            found = fedsim.contributions(run, score, how=how, progress=False)
            columns[f"{name}/{how}"] = found.values
    last = run.rounds.iloc[-1]
    table = pd.DataFrame(columns).rename_axis("client").reset_index()
    table.insert(0, "seed", seed)
    return table.assign(**{name: last[score] for name, score in SCORES.items()}).to_dict("records")


def run_all(out: str, seeds: range) -> None:
    RESULTS.mkdir(exist_ok=True)
    images, runs = (
        pd.read_csv(file).to_dict("records") if file.exists() else [] for file in (IMAGES, RUNS)
    )
    known = {row["seed"] for row in runs}
    for seed in seeds:
        if seed in known:
            continue
        experiment = fedsim.Experiment.load(HERE / "decision.yaml", [f"seed={seed}"])
        assert isinstance(experiment.data, Shortcut)
        holders = experiment.data.holders(CLIENTS, seed)
        run = fedsim.run(experiment, out, progress=False)
        images += on_images(run, holders, seed)
        runs += on_runs(run, holders, seed)
        pd.DataFrame(images).to_csv(IMAGES, index=False, float_format="%.5g")
        pd.DataFrame(runs).to_csv(RUNS, index=False, float_format="%.5g")
        print(time.strftime("%H:%M:%S"), seed, len(images), flush=True)


# By what clients are ranked, the column, and whether holders have high (1) or low (−1) values.
OF_RUNS = {
    "Shapley, accuracy without the tag": ("accuracy/shapley", -1),
    "leave-one-out, accuracy without the tag": ("accuracy/leave_one_out", -1),
    "Shapley, accuracy with others' tags": ("accuracy_against/shapley", -1),
    "leave-one-out, accuracy with others' tags": ("accuracy_against/leave_one_out", -1),
    "Shapley, relevance on the tag": ("relevance/shapley", 1),
    "leave-one-out, relevance on the tag": ("relevance/leave_one_out", 1),
}
OF_IMAGES = {
    "influence on the logit, exact": "influence",
    "influence on the logit, estimated": "estimate",
    "fall of the tag's share in the explanation": "tag_fall",
}
VARIANTS = {"against": "with the tag", "absent": "without it"}


def found(group: pd.DataFrame, column: str, sign: int = 1) -> pd.Series:
    """How well a ranking of clients finds the holders: precision at their number, and AUC."""
    values, holder = sign * group[column].to_numpy(), group["holder"].to_numpy(bool)
    first = np.argsort(-values, kind="stable")[: holder.sum()]
    return pd.Series({"precision": holder[first].mean(), "auc": roc_auc_score(holder, values)})


def rankings(images: pd.DataFrame, runs: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Precision and AUC of each ranking, by seed.

    Of decisions on images there are two: the mean over images of each image's ranking, and that of
    the clients' means over images.
    """
    ranked = {}
    for name, (column, sign) in OF_RUNS.items():
        ranked[name] = _each(runs, ["seed"], column, sign)
    for variant, words in VARIANTS.items():
        of = images[images["variant"] == variant]
        means = (
            of.groupby(["seed", "client"])[[*OF_IMAGES.values(), "holder"]].mean().reset_index()
        )
        for name, column in OF_IMAGES.items():
            single = _each(of, ["seed", "row"], column).groupby("seed").mean()
            ranked[f"{name}, an image {words}"] = single
            ranked[f"{name}, mean of images {words}"] = _each(means, ["seed"], column)
    return ranked


def _each(rows: pd.DataFrame, by: list[str], column: str, sign: int = 1) -> pd.DataFrame:
    return rows.groupby(by).apply(found, column, sign)


def tables(images: pd.DataFrame, runs: pd.DataFrame) -> Iterator[str]:
    ranked = rankings(images, runs)
    chance = {name: paired(of["auc"], of["auc"] * 0 + 0.5) for name, of in ranked.items()}
    ps = holm(each.p() for each in chance.values())
    rows = [
        [name, spread(of["precision"], 2), spread(of["auc"], 2), shown_p(p) if p == p else "–"]
        for (name, of), p in zip(ranked.items(), ps, strict=True)
    ]
    yield table(["clients ranked by", "precision at 2", "AUC", "p, AUC is 0.5"], rows)
    scores = runs.groupby("seed")[list(SCORES)].first()
    yield table(
        ["score of the run with all clients", "mean ± standard deviation"],
        [[SCORES[name], spread(scores[name])] for name in SCORES],
    )
    rows = []
    for (variant, holder), own in images.groupby(["variant", "holder"], sort=False):
        means = own.groupby("seed")[["influence", "estimate", "tag_fall", "changed"]].mean()
        who = "with the shortcut" if holder else "without it"
        rows.append([VARIANTS[variant], who, *(spread(means[name]) for name in means)])
    header = ["images", "client left out", "influence", "its estimate", "fall of the tag's share"]
    yield table([*header, "another decision"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs", help="where runs lie")
    run_all(parser.parse_args().out, SEEDS)
    for text in tables(pd.read_csv(IMAGES), pd.read_csv(RUNS)):
        print(f"{text}\n")


if __name__ == "__main__":
    main()
