"""What the coalitions of eight clients cost, beside as many runs from the start.

    python cost.py [PARTICIPATION ...]

The quickstart with eight clients, in one process, with all of them in each round and with fewer.
All 256 coalitions are played by `fedsim.contributions`; runs from the start are timed for sixteen
of them, drawn at random, and multiplied.
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import fedsim

QUICKSTART = Path(__file__).parents[1] / "quickstart.yaml"
CLIENTS, SAMPLE = 8, 16


def main() -> None:
    warnings.simplefilter("ignore")
    print("participation  coalitions  played in s  from the start in s  ratio  sum − gain")
    for participation in [float(given) for given in sys.argv[1:]] or (1.0, 0.5, 0.25):
        with TemporaryDirectory() as folder:
            changes = {
                "partition.clients": CLIENTS,
                "train.participation": participation,
                "engine.kind": "local",
                "checkpoint.every": 0,
            }
            run = fedsim.run(fedsim.Experiment.load(QUICKSTART, changes), folder, progress=False)
            began = time.perf_counter()
            found = fedsim.contributions(run, how="shapley", progress=False)
            played = time.perf_counter() - began
            rng, spent = np.random.default_rng(0), 0.0
            for number in rng.choice(2**CLIENTS - 2, SAMPLE, replace=False) + 1:
                others = [k for k in range(CLIENTS) if not number >> k & 1]
                experiment = fedsim.Experiment.load(QUICKSTART, {**changes, "without": others})
                began = time.perf_counter()
                fedsim.run(experiment, folder, progress=False)
                spent += time.perf_counter() - began
            whole = spent / SAMPLE * 2**CLIENTS
            off = sum(found.values.values()) - (found.everybody - found.nobody)
            print(
                f"{participation:13} {found.coalitions:11} {played:12.1f} {whole:20.1f} "
                f"{played / whole:6.2f} {off:11.1e}"
            )


if __name__ == "__main__":
    main()
