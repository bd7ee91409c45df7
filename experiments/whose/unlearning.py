"""W3: which methods only look as if they had forgotten? python unlearning.py [--out runs]

Writes unlearning.csv beside this file, a row for each model, and prints the tables of the README.
With --done only the tables, of the file that is there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

import fedsim

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from tables import spread, table  # noqa: E402

CSV = HERE / "unlearning.csv"
SEEDS = range(5)
# What the client to forget has done; an honest one is the same client, dealt the same examples.
DONE: dict[str, dict[str, Any]] = {
    "backdoor": {},
    "flipped labels": {"adversaries.attack": {"name": "label_flip"}},
    "nothing": {"adversaries": None},
}
METHODS: dict[str, dict[str, Any]] = {
    "fine_tune": {"name": "fine_tune"},
    "gradient_ascent": {"name": "gradient_ascent"},
    "fed_quit": {"name": "fed_quit"},
    "fed_eraser Δt=2": {"name": "fed_eraser"},
    "fed_eraser Δt=1": {"name": "fed_eraser", "every": 1},
}
SHOWN = {
    "weights": "weights",
    "kl": "KL, test",
    "kl_forgotten": "KL, forgotten",
    "explanations_rank": "explanations",
    "accuracy": "accuracy",
    "accuracy_kept": "kept",
    "accuracy_forgotten": "forgotten",
    "mia": "AUC",
    "backdoor_success": "backdoor",
    "rounds": "rounds",
    "kB": "kB",
}


def rows(out: Path) -> Iterator[dict[str, Any]]:
    """The scores of each model of each run."""
    for what, changes in DONE.items():
        for seed in SEEDS:
            of_adversary = {"seed": seed, "name": f"whose-unlearning-{what.split()[0]}"}
            sheet = fedsim.Experiment.load(HERE / "unlearning.yaml", of_adversary)
            assert sheet.adversaries is not None
            (client,) = sheet.adversaries.draw(sheet.partition.clients, seed)
            experiment = fedsim.Experiment.load(HERE / "unlearning.yaml", of_adversary | changes)
            run = fedsim.run(experiment, out, progress=False)
            for name, method in METHODS.items():
                scores = fedsim.unlearn(run, client, method, progress=False).scores
                found = {name: scores.iloc[-1]}
                if name == next(iter(METHODS)):
                    found = {**dict(list(scores.iterrows())[:2]), **found}
                for model, row in found.items():
                    about = {"done": what, "seed": seed, "client": client, "model": model}
                    yield {**about, **row.to_dict(), "hash": run.result_hash}
            print(f"{what}, seed {seed}: client {client}", flush=True)


def tables(results: pd.DataFrame) -> Iterator[str]:
    """A table for each thing that the client has done, mean ± standard deviation over seeds."""
    results = results.assign(kB=(results["bytes_up"] + results["bytes_down"]) / 1000)
    for what, own in results.groupby("done", sort=False):
        shown = {key: label for key, label in SHOWN.items() if own[key].notna().any()}
        body = []
        for model, of in own.groupby("model", sort=False):
            cells = [
                f"{of[key].mean():.0f}" if key in ("rounds", "kB") else spread(of[key])
                for key in shown
            ]
            body.append([str(model), *cells])
        yield table([str(what), *shown.values()], body)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--out", type=Path, default=Path("runs"), help="where runs lie")
    made.add_argument("--done", action="store_true", help="only print the tables")
    asked = made.parse_args()
    if not asked.done:
        pd.DataFrame(rows(asked.out)).to_csv(CSV, index=False, float_format="%.6g")
    for each in tables(pd.read_csv(CSV)):
        print(f"{each}\n")


if __name__ == "__main__":
    main()
