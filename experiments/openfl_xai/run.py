"""Answer claim F1, run grid.yaml, and tabulate: python run.py [--out runs] [--grid FOLDER].

Needs OpenFL-XAI's files and KEEL's Mortgage below $FEDSIM_DATA. Writes results.csv beside this
file, a row for each run, and prints the tables of the README.
"""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.linear_model import LinearRegression

import fedsim
from fedsim import Grid
from fedsim.data import Dataset
from fedsim.models import Rules
from fedsim.models.tsk import Tsk, read_published
from fedsim.objectives import Regression

HERE = Path(__file__).parent
PUBLISHED = Path("openfl_xai", "global_models", "tsk")


def answer_f1(data: Path, out: Path) -> str:
    """The published rule base beside the one that the simulator's federation comes to."""
    experiment = fedsim.Experiment.load(HERE / "published.yaml")
    run = fedsim.run(experiment, out)
    published = read_published(data / PUBLISHED)
    dataset = experiment.data.load()
    collaborators = np.unique(dataset.columns["collaborator"])
    bases = []
    for name in collaborators:
        rows = dataset.columns["collaborator"] == name
        base = Tsk().train(dataset.x[rows], dataset.y[rows], np.random.default_rng(0))
        bases.append({key: array.astype(np.float32) for key, array in base.items()})
    found = {name: array.numpy() for name, array in run.weights().items()}
    lines = [
        "| base | equal antecedents | weights, largest difference | weights equal to the bit "
        "| consequents, largest difference | consequents equal to the bit |",
        "| --- | --- | --- | --- | --- | --- |",
        _compare("the federated run", found, published),
    ]
    for order in ((0, 4, 3, 1, 2), (4, 3, 2, 1, 0)):
        merged, _ = Tsk().merge([bases[k] for k in order])
        words = ", ".join(str(k) for k in order)
        lines.append(_compare(f"merged in the order {words}", merged, published))
    every = [Tsk().merge([bases[k] for k in o])[0] for o in itertools.permutations(range(5))]
    worst = {
        name: max(float(np.abs(m[name] - published[name]).max()) for m in every)
        for name in ("weights", "consequents")
    }
    lines.append(
        f"\nWorst of all 120 orders: weights {worst['weights']:.2g}, consequents "
        f"{worst['consequents']:.2g}. Result hash {run.result_hash}."
    )
    lines += ["", *_scores(data, published, bases)]
    return "\n".join(lines)


def _scores(data: Path, published: Rules, bases: list[Rules]) -> list[str]:
    """R² of the published rules, and of each collaborator's own, on the files' test sets."""

    def r2(rules: Rules, folder: str, model: Tsk) -> float:
        x, y = (np.load(data / "openfl_xai" / "data" / folder / f"{n}_test.npy") for n in "Xy")
        return Regression().scores_of(model.predict(rules, x).values, y)["r2"]

    winner, average = Tsk(), Tsk(inference="average")
    lines = [
        f"data/X_test.npy: R² {r2(published, '', winner):.4f} with the winner rule, "
        f"{r2(published, '', average):.4f} with the average",
        "",
        "| | " + " | ".join(f"col{k}" for k in range(5)) + " |",
        "| --- " * 6 + "|",
    ]
    for what, rules in (("its own rules", bases), ("the federated rules", [published] * 5)):
        cells = [f"{r2(base, f'col{k}', winner):.3f}" for k, base in enumerate(rules)]
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    return lines


def _compare(what: str, found: Rules, published: Rules) -> str:
    cells = [f"{(found['antecedents'] == published['antecedents']).all(axis=1).sum()} of 25"]
    for name in ("weights", "consequents"):
        difference = np.abs(found[name].astype(np.float64) - published[name])
        same = int((found[name] == published[name]).sum())
        cells += [f"{difference.max():.2g}", f"{same} of {difference.size}"]
    return f"| {what} | " + " | ".join(cells) + " |"


def describe(run: fedsim.Run, cell: dict[str, Any]) -> dict[str, Any]:
    """What is reported of a run, after its last round."""
    last = run.rounds.iloc[-1]
    row = {**cell, "R²": last["r2"], "RMSE": last["rmse"]}
    for name in ("rules", "rule_length", "coverage", "active_rules", "shared_rules"):
        row[name] = last.get(name, np.nan)
    row["sent"] = (last["total_bytes_up"] + last["total_bytes_down"]) / run.manifest["clients"]
    row["seconds"] = run.rounds["seconds"].sum()
    row["result_hash"] = run.result_hash
    return row


def tabulate(results: pd.DataFrame) -> str:
    """A Markdown table: a row for each cell, mean ± standard deviation over its seeds."""
    lines = [
        "| learner | R² | rules | conditions a rule | covered | active rules | shared rules "
        "| bytes a client |",
        "| --- " * 8 + "|",
    ]
    for learner, rows in results.groupby("learner", sort=False):
        cells = [f"{rows['R²'].mean():.3f} ± {rows['R²'].std():.3f}"]
        if rows["rules"].isna().all():
            cells += ["–"] * 5
        else:
            cells += [f"{rows[c].mean():.1f}" for c in ("rules", "rule_length")]
            cells.append(f"{rows['coverage'].mean():.1%}")
            cells.append(f"{rows['active_rules'].mean():.1f}")
            federated = (rows["sent"] > 0).any()
            cells.append(f"{rows['shared_rules'].mean():.1f}" if federated else "–")
        cells.append(f"{rows['sent'].mean():,.0f}")
        lines.append(f"| {learner} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def linear_regression(dataset: Dataset) -> str:
    """The row of a linear regression on all training rows."""
    model = LinearRegression().fit(dataset.x, dataset.y)
    scores = Regression().scores_of(model.predict(dataset.test_x), dataset.test_y)
    return f"| linear regression, centralised | {scores['r2']:.3f} |" + " – |" * 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where runs lie")
    parser.add_argument("--grid", type=Path, help="a finished grid to tabulate")
    arguments = parser.parse_args()
    print(answer_f1(Path(os.environ["FEDSIM_DATA"]), arguments.out))
    if arguments.grid:
        grid = Grid.open(arguments.grid)
    else:
        grid = fedsim.grid(HERE / "grid.yaml", out=arguments.out, progress=print)
    rows, datasets = [], {}
    for entry in grid.manifest["cells"]:
        run = fedsim.load(grid.path / entry["folder"])
        rows.append(describe(run, {**entry["cell"], "seed": entry["seed"]}))
        datasets.setdefault(entry["cell"]["data"], run.experiment.data)
    results = pd.DataFrame(rows)
    results.to_csv(HERE / "results.csv", index=False, float_format="%.6g")
    for data, part in results.groupby("data", sort=False):
        print(f"\n### {data}\n")
        print(tabulate(part))
        print(linear_regression(datasets[str(data)].load()))


if __name__ == "__main__":
    main()
