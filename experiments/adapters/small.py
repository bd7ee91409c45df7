"""Adapters of a small encoder, many seeds: python small.py [--tune] [--done ...].

The encoder is trained on Reuters' news first (small/encoder.yaml), unless it lies in the folder
that --out names; its head is replaced by zeros. With --tune learning rates are compared, on a seed
that no table has; with --done finished grids are tabulated. R8, TREC and GloVe's vectors lie below
$FEDSIM_DATA.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import load_file, save_file

import fedsim
from fedsim import Grid
from fedsim.config.file import RawConfig
from fedsim.results.maps import similarity

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from tables import against, finished, parser, spread, table  # noqa: E402

CLASSES = 6
EXPLAINER = "integrated_gradients"
TRIED = (0.002, 0.005, 0.01, 0.02, 0.04)
# Chosen among them by accuracy at α = 1 with seed 100.
RATES = {
    "all weights": 0.005,
    "head alone": 0.04,
    "FedIT r=1": 0.01,
    "FedIT": 0.01,
    "FedIT r=16": 0.01,
    "FFA-LoRA": 0.02,
    "FedSA-LoRA": 0.01,
    "FLoRA": 0.02,
    "FedEx-LoRA": 0.01,
    "pooled": 0.002,
    "text_cnn": 0.005,
}


def vectors() -> Path:
    return Path(os.environ["FEDSIM_DATA"]) / "glove/glove.twitter.27B.25d.top12k.txt.gz"


def encoder(out: Path) -> Path:
    """The encoder's weights with a head of zeros."""
    path = out / "encoder.safetensors"
    if not path.exists():
        sheet = HERE / "small" / "encoder.yaml"
        run = fedsim.run(fedsim.Experiment.load(sheet, [f"data.vectors={vectors()}"]), out)
        print(f"encoder: accuracy {run.rounds['accuracy'].iloc[-1]:.4f} on R8")
        weights = load_file(run.path / "weights" / "final.safetensors")
        weights["head.weight"] = torch.zeros(CLASSES, weights["head.weight"].shape[1])
        weights["head.bias"] = torch.zeros(CLASSES)
        save_file(weights, path)
    return path.absolute()


def placed(sheet: RawConfig, out: Path, data: str = "data") -> RawConfig:
    """A file with what depends on the machine: vectors of words, and the encoder.

    Args:
        data: the section of the documents.
    """
    files = {f"{data}.vectors": vectors(), "train.initial_weights": encoder(out)}
    return sheet.changed({key: str(path) for key, path in files.items()}, "this machine")


def content(out: Path, **changes: Any) -> dict[str, Any]:
    """The grid's file for this machine."""
    return {**placed(RawConfig.read(HERE / "small" / "trec6.yaml"), out).content, **changes}


def tune(out: Path) -> None:
    """Print the accuracy of each variant at each learning rate, with a seed of its own."""
    sheet = content(out, name="adapters-rates", explain=None)
    variants = {
        name: {key: value for key, value in own.items() if not key.startswith("explain")}
        for name, own in sheet["grid"]["axes"]["variant"].items()
    }
    axes = {"variant": variants, "train.optimizer.lr": list(TRIED)}
    grid = fedsim.grid({**sheet, "grid": {"axes": axes, "seeds": [100]}}, out=out, progress=print)
    rows = [
        {**cell, "accuracy": run.rounds["accuracy"].iloc[-1]} for cell, run in finished([grid])
    ]
    found = pd.DataFrame(rows).pivot(index="variant", columns="train.optimizer.lr")["accuracy"]
    print(found.round(3).to_string())
    print(found.idxmax(axis=1).to_dict())


def run(out: Path) -> Grid:
    sheet = content(out)
    variants = sheet["grid"]["axes"]["variant"]
    tuned = {name: {**own, "train.optimizer.lr": RATES[name]} for name, own in variants.items()}
    axes = {**sheet["grid"]["axes"], "variant": tuned}
    return fedsim.grid({**sheet, "grid": {**sheet["grid"], "axes": axes}}, out=out, progress=print)


def of_clients(run: fedsim.Run) -> pd.Series:
    """The accuracy of each client's model on the test questions, weighted by its own labels.

    Clients differ in labels alone, so that this is what each has to expect of its own questions:
    questions held out for it would be too few to tell, and missing in training.
    """
    labels = run.labels.pivot(index="client", columns="label", values="examples").fillna(0)
    personal = run.experiment.method.keeps_models
    models = labels.index if personal else [None]
    right = pd.DataFrame([by_class(run, client) for client in models])
    recall = right.to_numpy() if personal else right.to_numpy().repeat(len(labels), axis=0)
    return (labels[right.columns] * recall).sum(axis=1) / labels.sum(axis=1)


def by_class(run: fedsim.Run, client: int | None) -> pd.Series:
    """The accuracy of a model on the test questions of each class."""
    found = fedsim.predictions(run, client)
    return (found["target"] == found["prediction"]).groupby(found["target"]).mean()


def rows(found: list[Grid]) -> pd.DataFrame:
    """Accuracy, bytes and explanations of each run, some beside the pooled run of its seed."""
    runs = list(finished(found))
    pooled = {
        (cell["seed"], cell["partition.alpha"]): run
        for cell, run in runs
        if cell["variant"] == "pooled"
    }
    rows = []
    for cell, run in runs:
        last = run.rounds.iloc[-1]
        row = {**cell, "hash": run.result_hash, "accuracy": last["accuracy"]}
        own = of_clients(run)
        row["of_clients"], row["worst_decile"] = own.mean(), own.quantile(0.1)
        row["kB_up"] = last["total_bytes_up"] / 1000 / run.manifest["clients"] / len(run.rounds)
        row["gap"] = last.get("adapter_gap")
        row["deletion"] = last.get(f"{EXPLAINER}/deletion")
        row["agreement"] = last.get(f"{EXPLAINER}/client_agreement_rank")
        beside = pooled.get((cell["seed"], cell["partition.alpha"]))
        if run.experiment.method.has_global_model and beside is not None:
            row["as_pooled"] = similarity(run, beside, EXPLAINER)
        rows.append(row)
    return pd.DataFrame(rows)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--tune", action="store_true", help="only compare learning rates")
    asked = made.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.tune:
        return tune(asked.out)
    results = rows([Grid.open(p) for p in asked.done] if asked.done else [run(asked.out)])
    results.to_csv(HERE / "small.csv", index=False, float_format="%.6g")
    columns = [
        "accuracy",
        "of_clients",
        "worst_decile",
        "kB_up",
        "gap",
        "agreement",
        "as_pooled",
        "deletion",
    ]
    for alpha, own in results.groupby("partition.alpha"):
        print(f"\nα = {alpha}, {own['seed'].nunique()} seeds\n")
        by = own.groupby("variant", sort=False)
        lines = [[name, *(spread(of[column]) for column in columns)] for name, of in by]
        print(table(["", *columns], lines))
        for column in ("accuracy", "worst_decile"):
            compared = against(own.rename(columns={"variant": "method"}), "all weights", column)
            print(f"\n{column} of all weights less that of …\n")
            lines = [[name, *cells] for name, cells in compared.items()]
            print(table(["", "difference", "p", "detectable"], lines))
    return None


if __name__ == "__main__":
    main()
