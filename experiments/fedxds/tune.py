"""Tune the methods of small/heterogeneity.yaml with the same budget: python tune.py [--out runs]

Each method gets eight trials, those of `SPACES`: learning rates of the clients, and a setting of
its own. They are scored on a tenth of the training examples, held out before clients get theirs.
Writes results/tuning.csv and prints the best trial of each method; --done FIRST SECOND: of both
finished grids.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tuning import Space, tune

HERE = Path(__file__).parent
LR, MOMENTUM = "train.optimizer.lr", "train.optimizer.momentum"
RATES = (0.005, 0.01, 0.02, 0.04)
PLAIN_RATES = (0.02, 0.05, 0.1, 0.2)  # without momentum

SPACES: dict[str, Space] = {
    "FedAvg": (
        {"method.name": "fedavg"},
        {LR: (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06)},
    ),
    "FedProx": ({"method.name": "fedprox"}, {LR: RATES, "method.mu": (0.01, 0.1)}),
    "FedDyn": (
        {"method.name": "feddyn", MOMENTUM: 0},
        {LR: PLAIN_RATES, "method.alpha": (0.01, 0.1)},
    ),
    "SCAFFOLD": (
        {"method.name": "scaffold"},
        {MOMENTUM + "," + LR: (*product((0.9,), RATES), *product((0,), PLAIN_RATES))},
    ),
    "FedSAM": ({"method.name": "fedsam"}, {LR: RATES, "method.rho": (0.01, 0.05)}),
    "FedDisco": ({"method.name": "feddisco"}, {LR: RATES, "method.a": (0.1, 0.5)}),
    "FedFTG": ({"method.name": "fedftg"}, {LR: RATES, "method.iterations": (1, 3)}),
    "FedGen": (
        {"method.name": "fedgen"},
        {
            "method.a,method.b": ((0.1, 0.1), (1, 1)),
            MOMENTUM + "," + LR: ((0, 0.05), (0, 0.1), (0.9, 0.005), (0.9, 0.01)),
        },
    ),
    "FedAUX": (
        {"method.name": "fedaux", "method.epsilon": None},  # its noise would hide all scores
        {LR: RATES, "method.lr": (5e-5, 5e-4)},
    ),
    "FedDF": ({"method.name": "feddf"}, {LR: RATES, "method.lr": (3e-4, 1e-3)}),
    "FedFed": (
        {"method.name": "fedfed", "method.width": 8},
        {LR: RATES, "method.distillation_rounds": (5, 15)},
    ),
    "FedXLRP": (
        {"method.name": "fedxds"},
        {LR: RATES, "method.attribute_with": ("global", "local")},
    ),
}


if __name__ == "__main__":
    changes = {
        "name": "fedxds-tuning",
        "method": {"name": "fedavg"},
        "evaluate.validation": 0.1,
    }
    file = HERE / "small" / "heterogeneity.yaml"
    tune(__doc__, file, changes, SPACES, "validation_accuracy")
