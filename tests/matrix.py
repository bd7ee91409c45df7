"""Every method with every kind of model and every condition that can meet it.

As a script it writes what became of each cell: python tests/matrix.py [--part I/N] > cells.csv
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from itertools import product
from pathlib import Path
from typing import Any

from experiments import LATE, NEEDS
from fedsim import Experiment, run
from fedsim.errors import BadInput, FedsimError
from fedsim.launch.prepare import prepare
from fedsim.methods import methods
from fedsim.testing import small_experiment

IMAGES: dict[str, Any] = {
    "data": {"name": "digits", "subset": 0.2},
    "partition": {"kind": "dirichlet", "clients": 7, "alpha": 1.0, "min_samples": 6},
}
TEXTS: dict[str, Any] = {
    "data": {
        "name": "planted_reviews",
        **{"reviews": 60, "test_reviews": 20, "fillers": 3, "dimension": 5, "length": 10},
    },
    "partition": {"kind": "aspects", "clients": 4},
}

MODELS: dict[str, dict[str, Any]] = {
    "mlp": {**IMAGES, "model": {"name": "mlp", "hidden": [12]}},
    "cnn": {**IMAGES, "model": {"name": "cnn"}},
    "dropout": {**IMAGES, "model": {"name": "networks:regularised"}},
    "batch norm": {**IMAGES, "model": {"name": "networks:normalised"}},
    "resnet": {**IMAGES, "model": {"name": "resnet8", "width": 2}},
    "frozen": {**IMAGES, "model": {"name": "networks:frozen"}},
    "text": {**TEXTS, "model": {"name": "text_cnn", "kernels": [1, 2], "filters": 4, "hidden": 6}},
    "rationale": {**TEXTS, "model": {"name": "rationale", "hidden": 4}},
    "rules": {
        "data": {"name": "friedman", "samples": 100, "test_samples": 30, "features": 3},
        "partition": {"kind": "iid", "clients": 5},
        "model": {"name": "tsk", "rules": 3},
    },
}

CONDITIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "accumulate": {"train": {"accumulate": 5}},
    "bfloat16": {"train": {"precision": "bfloat16"}},
    "example privacy": {"privacy": {"level": "example", "clip": 1.0, "noise_multiplier": 0.5}},
    "client privacy": {"privacy": {"clip": 1.0, "noise_multiplier": 0.1}},
    "uplink": {"uplink": {"name": "topk", "fraction": 0.1}},
    "downlink": {"downlink": {"name": "int8"}},
    "deadline": {"devices": {"speed": {"median": 60, "sigma": 1}, "deadline": 2.0}},
    "partial work": {
        "devices": {"speed": {"median": 60, "sigma": 1}, "deadline": 2.0, "partial_work": True}
    },
}

METHODS = [name for name, _ in methods.items()]
CELLS = list(product(METHODS, MODELS, CONDITIONS))


def sections(method: str, model: str, condition: str) -> dict[str, Any]:
    """The sections of a cell's experiment: two rounds, or as many as the method's phases take."""
    rounds = 4 if method in LATE else 2
    made: dict[str, Any] = {
        "train": {"rounds": rounds, "batch_size": 5},
        "method": {"name": method},
    }
    for part in (MODELS[model], NEEDS.get(method, {}), CONDITIONS[condition]):
        for key, section in part.items():
            if key == "model" and "model" in made:  # the cell's own, not what the method needs
                continue
            made[key] = {**made.get(key, {}), **section}
    return made


def outcome(method: str, model: str, condition: str, out: Path, **further: Any) -> tuple[str, str]:
    """What becomes of a cell: trains, refused (before the start), or fails; and the line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            experiment: Experiment = small_experiment(
                **sections(method, model, condition), **further
            )
            prepare(experiment)
        except BadInput as refusal:
            line = str(refusal)
            return ("fails" if "\n" in line else "refused"), line
        except Exception as error:
            return "fails", repr(error)
        try:
            done = run(experiment, out, progress=False)
        except FedsimError as error:
            return "fails", str(error).partition("\n")[0]
        except Exception as error:
            return "fails", repr(error)
        return "trains", done.result_hash


if __name__ == "__main__":
    logging.disable(logging.INFO)
    i, n = (int(x) for x in sys.argv[sys.argv.index("--part") + 1].split("/"))
    engine = {"engine": {"gpus_per_actor": 0.05}} if "--gpu" in sys.argv else {}
    with tempfile.TemporaryDirectory() as folder:
        for number, cell in enumerate(CELLS[i::n]):
            state, line = outcome(*cell, Path(folder, str(number)), **engine)
            print("\t".join([*cell, state, line.replace("\t", " ")]), flush=True)
