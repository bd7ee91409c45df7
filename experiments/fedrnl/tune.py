"""Tune the methods of small/methods.yaml with the same budget: python tune.py [--out runs]

Each method gets eight trials, those of `SPACES`: learning rates of the clients, and a setting of
its own. Training and test reviews are others than those of the tables. Writes results/tuning.csv
and prints the best trial of each method; --done FIRST SECOND: of both finished grids.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tuning import Space, tune

HERE = Path(__file__).parent
LR = "train.optimizer.lr"
ALL_RATES = (0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015)
RATES = (0.002, 0.004, 0.006, 0.01)
SPACES: dict[str, Space] = {
    "FedAvg": ({"method.name": "fedavg"}, {LR: ALL_RATES}),
    "FedProx": ({"method.name": "fedprox"}, {LR: RATES, "method.mu": (0.0001, 0.001)}),
    "FedBABU": (
        {"method.name": "fedbabu"},
        {LR: RATES, "model.fixed_chooser": (False, True)},
    ),
    "FedDyn": ({"method.name": "feddyn"}, {LR: RATES, "method.alpha": (0.0001, 0.001)}),
    "MOON": ({"method.name": "moon", "method.tau": 0.5}, {LR: RATES, "method.mu": (0.1, 1)}),
    "FedRNL": ({"method.name": "fedrnl"}, {LR: RATES, "method.lam": (0.0003, 0.004)}),
    "FR": ({"model.shared": True}, {LR: ALL_RATES}),
    "centralised": ({"method.name": "centralised"}, {LR: ALL_RATES}),
}


if __name__ == "__main__":
    changes = {"name": "fedrnl-tuning", "data.seed": 1}
    tune(__doc__, HERE / "small" / "methods.yaml", changes, SPACES, "accuracy")
