"""Every method with every kind of model and every condition that can meet it.

As a script it writes what became of each cell: python tests/matrix.py --part I/N > cells.tsv
With --page it writes docs/reference/combinations.md: each method on one kind of model.
"""

from __future__ import annotations

import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

from experiments import LATE, NEEDS, TREES
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
TASKS: dict[str, Any] = {
    "data": {
        "name": "text",
        "path": str(Path(__file__).with_name("documents.txt")),
        "dimension": 7,
    },
    "partition": {
        "kind": "own_tasks",
        "tasks": [[["a", "b"], ["c", "d"]], [["b", "c"], ["a", "d"]], [["c", "d"], ["a", "b"]]],
    },
}

MODELS: dict[str, dict[str, Any]] = {
    "mlp": {**IMAGES, "model": {"name": "mlp", "hidden": [12]}},
    "cnn": {**IMAGES, "model": {"name": "cnn"}},
    "dropout": {**IMAGES, "model": {"name": "networks:regularised"}},
    "batch norm": {**IMAGES, "model": {"name": "networks:normalised"}},
    "resnet": {
        **IMAGES,
        "model": {"name": "resnet8", "width": 2},
        "train": {"optimizer": {"lr": 0.01}},  # at 0.1 q-FedAvg diverges
    },
    "additive": {
        "data": {"name": "synthetic", "samples": 300, "shape": [6], "classes": 3},
        "partition": IMAGES["partition"],
        "model": {"name": "nam", "hidden": [6, 4], "dropout": 0.1, "feature_dropout": 0.1},
    },
    "concepts": {
        "data": {"name": "shapes", "samples": 120, "test_samples": 30},
        "partition": IMAGES["partition"],
        "model": {"name": "concept_bottleneck", "network": {"name": "mlp", "hidden": [6]}},
        "train": {"optimizer": {"lr": 0.02}},  # at 0.05 adapters diverge
    },
    "frozen": {**IMAGES, "model": {"name": "networks:frozen"}},
    "text": {**TEXTS, "model": {"name": "text_cnn", "kernels": [1, 2], "filters": 4, "hidden": 6}},
    "rationale": {**TEXTS, "model": {"name": "rationale", "hidden": 4}},
    "tasks": {
        **TASKS,
        "model": {"name": "text_cnn", "kernels": [1, 2], "filters": 3, "hidden": 5},
        "train": {"optimizer": {"name": "adam", "lr": 0.01}},
    },
    "rules": {
        "data": {"name": "friedman", "samples": 100, "test_samples": 30, "features": 5},
        "partition": {"kind": "iid", "clients": 5},
        "model": {"name": "tsk", "rules": 3},
        "train": {"rounds": 1},
    },
}

MODELS["trees"] = {**IMAGES, **TREES}

DEVICES: dict[str, Any] = {"speed": {"median": 60, "sigma": 1}, "deadline": 2.0}
EXPLAIN: dict[str, Any] = {"of": ["cohort"], "inputs": 3, "target": "label"}

# The columns of the page, and what else changes how clients train.
CONDITIONS: dict[str, dict[str, Any]] = {
    "privacy: client": {"privacy": {"clip": 1.0, "noise_multiplier": 0.1}},
    "privacy: example": {"privacy": {"level": "example", "clip": 1.0, "noise_multiplier": 0.5}},
    "secure_aggregation": {"secure_aggregation": {}},
    "aggregation": {"aggregation": {"name": "median"}},
    "adversaries: updates": {"adversaries": {"share": 0.3, "attack": {"name": "sign_flip"}}},
    "adversaries: data": {"adversaries": {"share": 0.3, "attack": {"name": "label_flip"}}},
    "uplink": {"uplink": {"name": "topk", "fraction": 0.1}},
    "downlink": {"downlink": {"name": "int8"}},
    "devices: deadline": {"devices": DEVICES},
    "devices: partial work": {"devices": {**DEVICES, "partial_work": True}},
    "explain: cohort": {"explain": EXPLAIN},
    "explain: share": {"explain": {**EXPLAIN, "of": ["global", "cohort"], "share": {}}},
    "your own": {"conditions": [{"name": "own_channel:Lossy"}]},
}
TRAINING: dict[str, dict[str, Any]] = {
    "none": {},
    "accumulate": {"train": {"accumulate": 5}},
    "bfloat16": {"train": {"precision": "bfloat16"}},
}

METHODS = [name for name, _ in methods.items()]
CELLS = list(product(METHODS, MODELS, {**TRAINING, **CONDITIONS}))
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "combinations.md"


def sections(method: str, model: str, condition: str) -> dict[str, Any]:
    """The sections of a cell's experiment: two rounds, or as many as the method's phases take."""
    rounds = 4 if method in LATE else 2
    train = {"rounds": rounds} | ({} if model == "trees" else {"batch_size": 5})
    made: dict[str, Any] = {"train": train, "method": {"name": method}}
    added = {**TRAINING, **CONDITIONS}[condition]
    for part in (MODELS[model], NEEDS.get(method, {}), added):
        for key, section in part.items():
            if key == "model" and "model" in made:  # the cell's own, not what the method needs
                continue
            made[key] = {**made.get(key, {}), **section} if isinstance(section, dict) else section
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


def model_of(method: str) -> str:
    """The kind of model on which the page shows a method."""
    learns = methods.find(method).learns
    if learns.models != "network":
        return "rules" if learns.models == "rule model" else "trees"
    if learns.task_sequences == "only":
        return "tasks"
    if "model" in NEEDS.get(method, {}):
        return "batch norm"
    return "rationale" if method == "fedrnl" else "mlp"


def reason(method: str, line: str) -> str:
    """A refusal without what differs from section to section, and from method to method."""
    line = re.sub(r"^experiment: ", "", line).replace(f"method.name={method}", "the method")
    line = re.sub(rf"^({'|'.join(Experiment.model_fields)})[\w.=]*: ", "", line)
    line = re.sub(r"(which|and) (privacy|secure_aggregation)", r"\1 the section", line)
    line = re.sub("^hides", "the section hides", line)
    line = re.split(r"; (?:methods that can|no method can|leave|take|use)\b", line)[0]
    return f"{line[0].upper()}{line[1:]}"


def page(cells: dict[tuple[str, str], tuple[str, str]]) -> str:
    """The table of methods and conditions, and why some are refused.

    Args:
        cells: what became of each method with each condition, and the line.
    """
    reasons: dict[str, int] = {}
    rows = []
    for method in METHODS:
        marks = []
        for condition in CONDITIONS:
            state, line = cells[method, condition]
            if state == "trains":
                marks.append("✓")
                continue
            assert state == "refused", (method, condition, line)
            number = reasons.setdefault(reason(method, line), len(reasons) + 1)
            marks.append(f"[{number}](#note-{number})")
        rows.append(f"| `{method}` | " + " | ".join(marks) + " |")
    works = sum(state == "trains" for state, _ in cells.values())
    names = " | ".join(
        f"`{section}`{': ' + what if what else ''}" if section != "your own" else section
        for section, _, what in (condition.partition(": ") for condition in CONDITIONS)
    )
    return "\n".join(
        [
            "# What combines with what",
            "",
            "Each method, with its default settings, and each section that changes what clients "
            "compute or send, and a "
            "[condition of your own](../guides/communication.md#your-own-condition). "
            f"{works} of {len(cells)} combinations work (✓); the others are refused before the "
            "run starts, for the numbered reasons. `python tests/matrix.py --page` writes this "
            "page, and a test compares it.",
            "",
            f"| method | {names} |",
            f"| --- |{' :-: |' * len(CONDITIONS)}",
            *rows,
            "",
            *(
                f'<a id="note-{number}"></a>{number}. {text}.  '
                for text, number in reasons.items()
            ),
            "",
        ]
    )


def outcomes(names: Iterable[str], folder: Path) -> dict[tuple[str, str], tuple[str, str]]:
    """What becomes of methods with each condition, each on its kind of model."""
    return {
        (method, condition): outcome(
            method, model_of(method), condition, folder / method / condition
        )
        for method, condition in product(names, CONDITIONS)
    }


if __name__ == "__main__":
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        if "--page" in sys.argv:
            PAGE.write_text(page(outcomes(METHODS, Path(folder))), encoding="utf-8")
            sys.exit()
        i, n = (int(x) for x in sys.argv[sys.argv.index("--part") + 1].split("/"))
        engine = {"engine": {"gpus_per_actor": 0.05}} if "--gpu" in sys.argv else {}
        for number, cell in enumerate(CELLS[i::n]):
            state, line = outcome(*cell, Path(folder, str(number)), **engine)
            print("\t".join([*cell, state, line.replace("\t", " ")]), flush=True)
