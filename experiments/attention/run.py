"""Faithfulness of explanations of two transformers: python run.py [--out runs] [--seeds 5].

Writes results.csv, a row for each data set, seed and explainer; runs that are there are not run
again. MNIST's and R8's files lie below $FEDSIM_DATA. Prints means with 95 % intervals over seeds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
from scipy.stats import t

import fedsim

HERE = Path(__file__).parent
SETS = ("mnist", "r8")
SCORES = ("deletion", "insertion", "comprehensiveness", "sufficiency")


def rows_of(name: str, seed: int, out: str) -> list[dict[str, object]]:
    run = fedsim.run(fedsim.Experiment.load(HERE / f"{name}.yaml", [f"seed={seed}"]), out)
    last = run.rounds.iloc[-1]
    about = {"data": name, "seed": seed, "accuracy": last["accuracy"]}
    explainers = [column.split("/")[0] for column in run.rounds if column.endswith("/deletion")]
    return [
        {**about, "explainer": one, **{score: last[f"{one}/{score}"] for score in SCORES}}
        for one in explainers
    ]


def interval(values: pd.Series) -> str:
    half = t.ppf(0.975, len(values) - 1) * values.std() / len(values) ** 0.5
    return f"{values.mean():.3f} ± {half:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs", help="where runs lie")
    parser.add_argument("--seeds", type=int, default=5)
    asked = parser.parse_args()
    results = HERE / "results.csv"
    for seed in range(asked.seeds):
        for name in SETS:
            done = pd.read_csv(results) if results.exists() else pd.DataFrame()
            if len(done) and ((done["data"] == name) & (done["seed"] == seed)).any():
                continue
            found = pd.DataFrame(rows_of(name, seed, asked.out))
            pd.concat([done, found]).to_csv(results, index=False, float_format="%.5f")
    found = pd.read_csv(results)
    for name in SETS:
        own = found[found["data"] == name]
        print(f"\n{name}, accuracy {interval(own.groupby('seed')['accuracy'].first())}")
        table = own.groupby("explainer")[list(SCORES)].agg(interval)
        print(table.to_string())


if __name__ == "__main__":
    main()
