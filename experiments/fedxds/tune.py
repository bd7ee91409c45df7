"""Tune the methods of small/heterogeneity.yaml with the same budget: python tune.py [--out runs]

Each method gets eight trials, those of `SPACES`: learning rates of the clients, and a setting of
its own. Trials have a seed of their own and are scored on a tenth of the training examples, held
out before clients get theirs, by the mean over the last five evaluated rounds. Writes
results/tuning.csv and prints the best trial of each method; --done FOLDER: of a finished grid.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

import fedsim
from fedsim import Grid
from fedsim.config_file import RawConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
from tables import finished, parser

HERE = Path(__file__).parent
SEED = 100  # of no table
LR, MOMENTUM = "train.optimizer.lr", "train.optimizer.momentum"
RATES = (0.005, 0.01, 0.02, 0.04)
PLAIN_RATES = (0.02, 0.05, 0.1, 0.2)  # without momentum

# What is fixed, and the axes that are tuned.
Space = tuple[Mapping[str, Any], Mapping[str, tuple[Any, ...]]]
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


def trials(space: Space) -> Iterator[dict[str, Any]]:
    """The changes of each trial; an axis of several keys has a tuple of values."""
    fixed, axes = space
    for values in product(*axes.values()):
        changes = dict(fixed)
        for keys, value in zip(axes, values, strict=True):
            several = keys.split(",")
            changes |= zip(several, value if len(several) > 1 else (value,), strict=True)
        yield changes


def search(out: Path) -> Grid:
    """Run all trials."""
    sheet = RawConfig.read(HERE / "small" / "heterogeneity.yaml")
    content = {**sheet.content, "name": "fedxds-tuning", "method": {"name": "fedavg"}}
    content["evaluate"] = {**content["evaluate"], "validation": 0.1}
    cells = {}
    for name, space in SPACES.items():
        for number, changes in enumerate(trials(space)):
            cells[f"{name} {number}"] = changes
    content["grid"] = {"axes": {"trial": cells}, "seeds": [SEED]}
    return fedsim.grid(content, out=out, progress=print)


def scores(grid: Grid) -> pd.DataFrame:
    """A row for each trial; one that diverged has no score."""
    found = {}
    for cell, run in finished([grid]):
        accuracy = run.rounds["validation_accuracy"].dropna()
        found[cell["trial"]] = accuracy.iloc[-5:].mean(), run.result_hash
    rows = []
    for name, space in SPACES.items():
        for number, changes in enumerate(trials(space)):
            score, hash = found.get(f"{name} {number}", (None, None))
            rows.append([name, json.dumps(changes), score, hash])
    return pd.DataFrame(rows, columns=["method", "changes", "validation_accuracy", "result_hash"])


def main() -> None:
    arguments = parser(__doc__).parse_args()
    grid = Grid.open(arguments.done[0]) if arguments.done else search(arguments.out)
    table = scores(grid)
    table.to_csv(HERE / "results" / "tuning.csv", index=False, float_format="%.6g")
    for name, own in table.dropna().groupby("method", sort=False):
        best = own.loc[own["validation_accuracy"].idxmax()]
        print(f"{name}: {best['changes']}  {best['validation_accuracy']:.3f}")


if __name__ == "__main__":
    main()
