"""Run methods.yaml for each method and seed, and tabulate: python run.py [--out runs].

Writes results.csv beside this file, a row for each run, and prints mean ± standard deviation over
seeds. Runs that are in results.csv already are not run again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

import fedsim

HERE = Path(__file__).parent
METHODS = {
    "FedAvg": ["method.name=fedavg"],
    "FedAvgM (β = 0.9)": ["method.name=fedavgm"],
    "FedProx (μ = 0.01)": ["method.name=fedprox"],
    "SCAFFOLD": ["method.name=scaffold"],
}
SEEDS = (0, 1, 2)


def score(run: fedsim.Run) -> dict[str, float | str]:
    """The papers' conventions, computed from the run's records."""
    accuracy = run.rounds["accuracy"]
    return {
        "last": accuracy.iloc[-1],
        "best": accuracy.max(),
        "mean of last 5": accuracy.iloc[-5:].mean(),
        "MB sent a client and round": (run.rounds.bytes_up + run.rounds.bytes_down).sum()
        / run.rounds.clients.sum()
        / 1e6,
        "result_hash": run.result_hash,
        "minutes": run.manifest["wall_seconds"] / 60,
    }


def tabulate(results: pd.DataFrame) -> str:
    """A Markdown table: a row for each method, mean ± std over its seeds."""
    columns = ["last", "best", "mean of last 5"]
    lines = [
        "| method | " + " | ".join(columns) + " | MB sent a client and round |",
        "| --- " * (len(columns) + 2) + "|",
    ]
    for method in METHODS:
        rows = results[results.method == method]
        cells = [f"{rows[c].mean():.4f} ± {rows[c].std():.4f}" for c in columns]
        sent = rows["MB sent a client and round"].mean()
        lines.append(f"| {method} | " + " | ".join(cells) + f" | {sent:.3f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs", help="where runs lie")
    out = parser.parse_args().out
    file = HERE / "results.csv"
    done = pd.read_csv(file).to_dict("records") if file.exists() else []
    for seed in SEEDS:
        for method, overrides in METHODS.items():
            if any(row["method"] == method and row["seed"] == seed for row in done):
                continue
            experiment = fedsim.Experiment.load(
                HERE / "methods.yaml", [*overrides, f"seed={seed}"]
            )
            run = fedsim.run(experiment, out)
            done.append({"method": method, "seed": seed, **score(run)})
            print(done[-1], flush=True)
            pd.DataFrame(done).to_csv(file, index=False)
    print(tabulate(pd.DataFrame(done)))


if __name__ == "__main__":
    main()
