"""Tune FedWeIT and FedSeIT with the same budget: python tune.py data.vectors=FILE [--out runs]

Each method gets eight trials, those of `SPACES`, on tasks of TREC50, scored on its test documents
(which are TREC6's, too) after the last task. Writes results/tuning.csv and prints the best trial
of each method; --done FIRST SECOND: of both finished grids.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tuning import Space, tune

HERE = Path(__file__).parent
AXES = {
    "train.optimizer.lr": (0.0005, 0.001, 0.002, 0.004),
    "method.lam1": (0.0001, 0.001),
}
SPACES: dict[str, Space] = {
    "FedWeIT": ({"method.name": "fedweit"}, AXES),
    "FedWeIT + dense": ({"method.name": "fedweit", "method.dense_layer": True}, AXES),
    "without others": ({"method.top_k": 0}, AXES),
    "FedSeIT": ({}, AXES),
    "SIT3": ({"method.top_k": 3}, AXES),
    "DLS": ({"method.share_dense": True}, AXES),
}


if __name__ == "__main__":
    changes = {
        "name": "fedseit-tuning",
        "data.name": "trec50",
        "evaluate.every": 15,
    }
    tune(__doc__, HERE / "small" / "transfer.yaml", changes, SPACES, "accuracy")
