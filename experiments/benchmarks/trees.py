"""Federated histogram trees beside XGBoost on the pooled rows.

    python experiments/benchmarks/trees.py
    python experiments/benchmarks/trees.py --rows 10000 --features 20 --rounds 10 --profile

100,000 rows of 50 features in two classes, ten clients, 100 trees of depth 6 on 64 bins, in one
process with one thread. Prints seconds and AUROC of fedsim over the clients and with one client,
and of XGBoost (`tree_method=hist`) on the same rows, if it is installed; and what takes the time.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import tempfile
import time
from importlib.util import find_spec
from typing import Any

from sklearn.metrics import roc_auc_score

import fedsim
from fedsim.data import load_dataset
from fedsim.models.boosted_trees import BoostedTrees


def experiment(asked: argparse.Namespace, clients: int) -> fedsim.Experiment:
    return fedsim.Experiment.from_dict(
        {
            "name": "trees",
            "data": {
                **{"name": "synthetic", "samples": asked.rows, "test_samples": 10_000},
                **{"shape": [asked.features], "classes": 2, "noise": 6.0},
            },
            "partition": {"kind": "iid", "clients": clients},
            "model": {"name": "boosted_trees", "depth": asked.depth, "bins": asked.bins},
            "method": {"name": "hist_trees"},
            "train": {"rounds": asked.rounds},
            "evaluate": {"every": asked.rounds, "metrics": ["auroc"]},
            "checkpoint": {"every": 0},
            "engine": {"kind": "local"},
        }
    )


def federated(asked: argparse.Namespace, clients: int) -> tuple[float, float, float]:
    """Seconds, AUROC, and megabytes that a client sends in a round."""
    with tempfile.TemporaryDirectory() as folder:
        done = fedsim.run(experiment(asked, clients), out=folder, progress=False)
        seconds = done.rounds["seconds"].sum()
        last = done.rounds.iloc[-1]
        return seconds, last["auroc"], last["total_bytes_up"] / clients / asked.rounds / 1e6


def of_xgboost(asked: argparse.Namespace) -> tuple[float, float]:
    """Seconds and AUROC on the pooled rows."""
    import xgboost

    data: Any = load_dataset(experiment(asked, 1).data)
    model = BoostedTrees()
    started = time.perf_counter()
    booster = xgboost.train(
        {
            **{"objective": "binary:logistic", "tree_method": "hist", "nthread": 1},
            **{"max_depth": asked.depth, "max_bin": asked.bins, "eta": model.eta},
            **{"lambda": model.lam, "min_child_weight": model.min_child_weight},
        },
        xgboost.DMatrix(data.x, data.y, nthread=1),
        asked.rounds,
    )
    seconds = time.perf_counter() - started
    return seconds, roc_auc_score(data.test_y, booster.predict(xgboost.DMatrix(data.test_x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        *(("rows", 100_000), ("features", 50), ("clients", 10), ("rounds", 100)),
        *(("depth", 6), ("bins", 64)),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--profile", action="store_true", help="where fedsim's time goes")
    asked = parser.parse_args()
    print(f"{asked.rows:,} rows × {asked.features} features, {asked.rounds} trees")
    if asked.profile:
        profile = cProfile.Profile()
        profile.runcall(federated, asked, asked.clients)
        pstats.Stats(profile).sort_stats("tottime").print_stats(20)
        return
    for clients in (asked.clients, 1):
        seconds, auroc, sent = federated(asked, clients)
        print(
            f"fedsim, {clients} clients: {seconds:.2f} s, AUROC {auroc:.4f}, {sent:.2f} MB sent "
            "a client and round"
        )
    if find_spec("xgboost"):
        seconds, auroc = of_xgboost(asked)
        print(f"XGBoost, pooled: {seconds:.2f} s, AUROC {auroc:.4f}")


if __name__ == "__main__":
    main()
