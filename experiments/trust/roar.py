"""ROAR (Hooker et al., NeurIPS 2019): does a network learn without the most relevant pixels?

    python experiments/trust/roar.py [--seeds 3] [--rounds 15]

Networks are trained by FedAvg on digits; each explainer's most relevant pixels of each image, for
its label, are set to the pixel's mean, in training and test images; and networks are trained anew
on these. The sooner accuracy falls, the better; `random` is chance.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import torch
from common import RESULTS
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from tables import spread, table

from fedsim import Run, run
from fedsim.analysis.replay import ModelSnapshot
from fedsim.explain.explainers import explainers
from fedsim.explain.scores.relevance import places

EXPLAINERS = ("integrated_gradients", "gradient", "occlusion", "lrp", "random")
SHARES = (0.1, 0.3, 0.5, 0.7)


def trained(x: NDArray[np.float32], y: NDArray[Any], rounds: int, seed: int, folder: Path) -> Run:
    path = folder / f"{len([*folder.iterdir()])}.npz"
    np.savez(path, x=x, y=y)
    experiment: dict[str, Any] = {
        "name": "roar",
        "seed": seed,
        "data": {"name": "npz", "path": str(path)},
        "partition": {"kind": "dirichlet", "alpha": 1, "clients": 10},
        "model": {"name": "cnn"},
        "method": {"name": "fedavg"},
        "train": {"rounds": rounds, "batch_size": 16, "optimizer": {"lr": 0.1}},
        "engine": {"kind": "local"},
    }
    return run(experiment, folder / "runs", progress=False)


def maps(of: Run, name: str, x: NDArray[np.float32], y: NDArray[Any]) -> NDArray[Any]:
    """(n, P) the relevance of each image's pixels for its label."""
    snapshot, explainer = ModelSnapshot.of(of), explainers.parse({"name": name})
    data = snapshot.data()
    about = data.prepare(x), torch.from_numpy(y)
    rng = explainer.rng(of.experiment.seed)
    return explainer.each(snapshot.explained(), data, *about, rng).reshape(len(x), -1)


def rows(rounds: int, seed: int) -> list[dict[str, Any]]:
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    found = []
    with TemporaryDirectory() as folder:
        whole = trained(x, y, rounds, seed, Path(folder))
        score = whole.rounds.iloc[-1]["accuracy"]
        for name in EXPLAINERS:
            order = places(maps(whole, name, x, y)).reshape(len(x), 1, 8, 8)
            found.append({"seed": seed, "explainer": name, "share": 0.0, "accuracy": score})
            for share in SHARES:
                without = np.where(order < round(64 * share), x.mean(axis=0), x)
                again = trained(without, y, rounds, seed, Path(folder))
                accuracy = again.rounds.iloc[-1]["accuracy"]
                about = {"seed": seed, "explainer": name, "share": share}
                found.append({**about, "accuracy": accuracy, "hash": again.result_hash})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    results = pd.DataFrame([row for s in range(asked.seeds) for row in rows(asked.rounds, s)])
    results.to_csv(RESULTS / "roar.csv", index=False)
    cells = results.groupby(["explainer", "share"])["accuracy"]
    body = [
        [name, *(spread(cells.get_group((name, share))) for share in (0.0, *SHARES))]
        for name in EXPLAINERS
    ]
    print(table(["accuracy without", "0 %", *(f"{share:.0%}" for share in SHARES)], body))


if __name__ == "__main__":
    main()
