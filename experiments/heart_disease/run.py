"""Four hospitals, several methods, ten seeds, and who looks at what: python run.py [--out runs].

Writes results.csv (a row for each run) and features.csv (a row for each model and feature) beside
this file, and prints the tables of the README. Runs that are in results.csv are not run again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import t

import fedsim
from fedsim.launch.prepare import dealt

HERE = Path(__file__).parent
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
NETWORKS = {
    "FedAvg": ["method.name=fedavg"],
    "FedProx (μ = 0.1)": ["method={name: fedprox, mu: 0.1}"],
    "SCAFFOLD": ["method.name=scaffold"],
    "Ditto (λ = 0.5)": ["method={name: ditto, lam: 0.5}"],
    "each hospital alone": ["method.name=local"],
    "pooled": ["method.name=centralised"],
}
TREES = [
    "model={name: boosted_trees}",
    *("train={rounds: 20}", "evaluate.every=20"),
    "explain={explainers: [tree_shap], every: 20, inputs: 64, target: label, maps: true}",
]
RULES = [  # they predict the number in the files, 0 to 4, and above a half is ill
    *("data.label=null", "data.classes=null", "data.target=num", "data.scale=minmax"),
    *("train.rounds=1", "evaluate.every=1", "explain=null"),
    "evaluate.metrics=['__main__:accuracy']",
    "method.name=openfl_xai",
]
METHODS = {
    **NETWORKS,
    "boosted trees, histograms": [*TREES, "method.name=hist_trees"],
    "boosted trees, bagging": [*TREES, "method.name=xgb_bagging"],
    "fuzzy rules": [*RULES, "model={name: tsk, rules: 20, fuzziness: 1.2}"],
    "tree rules": [*RULES, "model={name: tree_rules}"],
}
# The selection of FLamby: three features are left out, then all patients with a blank cell.
SOME = "age, sex, cp, trestbps, chol, fbs, restecg, thalach, exang, oldpeak"
TABLES = {
    "all": [],
    "no indicators": ["data.indicator=false"],
    "no ca and thal": [f"data.features=[{SOME}, slope]"],
    "FLamby's": [
        f"data.features=[{SOME}]",
        *("data.missing=drop", "data.indicator=false", "data.blanks=[]"),
    ],
}
SHOWN = ("FedAvg", "each hospital alone", "pooled", "boosted trees, histograms")
SEEDS = range(10)


def accuracy(severity: NDArray[Any], target: NDArray[Any]) -> float:
    """How often a predicted number, scaled from [0, 4] to [0, 1], says rightly who is ill."""
    return float(np.mean((severity.ravel() > 0.5 / 4) == (target.ravel() > 0.5 / 4)))


def described(run: fedsim.Run) -> dict[str, Any]:
    """What is reported of a run after its last round: accuracy on each hospital's own patients."""
    tests = run.clients[run.clients["round"] == run.clients["round"].max()]
    names = dict(enumerate(run.manifest["client_names"]))
    accuracy = {names[k]: a for k, a in zip(tests.client, tests.test_accuracy, strict=True)}
    tested = dealt(run.experiment)[1].test.lengths
    sizes = {names[k]: n for k, n in enumerate(tested.tolist())}
    together = sum(accuracy[h] * sizes[h] for h in HOSPITALS) / sum(sizes.values())
    worst, best = (choose(accuracy.values()) for choose in (min, max))
    return {
        **accuracy,
        "together": together,
        "gap": best - worst,
        "result_hash": run.result_hash,
        "seconds": run.manifest["wall_seconds"],
    }


def features(run: fedsim.Run) -> Iterator[dict[str, Any]]:
    """The share of each feature in the relevances of each model."""
    names = run.experiment.data.load().feature_names
    for (model, client), rows in run.maps.groupby(["model", "client"], dropna=False):
        size = np.abs(np.stack(rows["relevance"].to_numpy())).mean(axis=0)
        whose = "global" if model == "global" else run.manifest["client_names"][int(client)]
        for name, share in zip(names, size / size.sum(), strict=True):
            yield {"model": whose, "feature": name, "share": round(share, 5)}


def table(results: pd.DataFrame, name: str) -> str:
    """A Markdown table: a row for each method, mean ± standard deviation over its seeds."""
    columns = ["together", *HOSPITALS, "gap"]
    lines = ["| method | " + " | ".join(columns) + " |", "| --- " * (len(columns) + 1) + "|"]
    rows = results[results.table == name]
    for method in METHODS:
        own = rows[rows.method == method]
        if len(own):
            cells = [f"{own[c].mean():.3f} ± {own[c].std():.3f}" for c in columns]
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def differences(results: pd.DataFrame, more: str, less: str) -> str:
    """A Markdown table: the gain of one table over another, mean and 95 % interval over seeds."""
    columns = ["together", *HOSPITALS]
    lines = ["| method | " + " | ".join(columns) + " |", "| --- " * (len(columns) + 1) + "|"]
    paired = results.set_index(["table", "method", "seed"])[columns].sort_index() * 100
    half = float(t.ppf(0.975, len(SEEDS) - 1)) / np.sqrt(len(SEEDS))
    for method in METHODS:
        gain = paired.loc[more, method] - paired.loc[less, method]
        cells = [f"{gain[c].mean():+.1f} ± {half * gain[c].std():.1f}" for c in columns]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def most_relevant(shares: pd.DataFrame, count: int = 4) -> str:
    """A Markdown table: the features with the greatest shares of each model, mean over seeds."""
    lines = ["| method | model | looks at |", "| --- | --- | --- |"]
    some = shares[(shares.table == "all") & shares.method.isin(SHOWN)]
    mean = some.groupby(["method", "model", "feature"], sort=False)["share"].mean()
    for (method, model), own in mean.groupby(level=[0, 1], sort=False):
        top = own.droplevel([0, 1]).sort_values(ascending=False)[:count]
        told = ", ".join(f"{name} {share:.0%}" for name, share in top.items())
        lines.append(f"| {method} | {model} | {told} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs", help="where runs lie")
    out = parser.parse_args().out
    results, shares = HERE / "results.csv", HERE / "features.csv"
    done = pd.read_csv(results).to_dict("records") if results.exists() else []
    looked = pd.read_csv(shares).to_dict("records") if shares.exists() else []
    known = {(row["table"], row["method"], row["seed"]) for row in done}
    for seed in SEEDS:
        for name, of_table in TABLES.items():
            for method, of_method in METHODS.items():
                if (name, method, seed) in known:
                    continue
                data = f"data.path={HERE}/data/*.csv"
                overrides = [data, f"seed={seed}", *of_table, *of_method]
                if method in ("Ditto (λ = 0.5)", "each hospital alone"):
                    overrides.append("explain.of=[personal]")
                experiment = fedsim.Experiment.load(HERE / "heart.yaml", overrides)
                run = fedsim.run(experiment, out)
                about = {"table": name, "method": method, "seed": seed}
                done.append({**about, **described(run)})
                if experiment.explain is not None:
                    looked += [{**about, **row} for row in features(run)]
                pd.DataFrame(done).to_csv(results, index=False)
                pd.DataFrame(looked).to_csv(shares, index=False)
    for name in TABLES:
        print(f"{name}\n\n{table(pd.DataFrame(done), name)}")
    for less in ("no indicators", "no ca and thal"):
        print(f"all over {less}\n\n{differences(pd.DataFrame(done), 'all', less)}")
    print(most_relevant(pd.DataFrame(looked)))


if __name__ == "__main__":
    main()
