"""Result hashes of one short run of every method: `python tests/result_hashes.py [known.json]`.

Run it before and after a change that must not alter any result, on the same machine. Prints the
hashes as JSON; given those of before, also names on stderr what has changed, and exits with 1.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments import NETWORK_METHODS, with_method
from fedsim import run
from fedsim.testing import small_experiment

TRAIN = {"rounds": 4, "participation": 0.5}
WORDS = {"a": "one two three", "b": "four five six", "c": "one two four", "d": "three six"}
TASKS = [[["a", "b"], ["c", "d"]], [["b", "c"], ["a", "d"]], [["c", "d"], ["a", "b"]]]
REVIEWS = {
    "data": {"name": "planted_reviews", "reviews": 20, "test_reviews": 5, "dimension": 4},
    "partition": {"kind": "aspects", "clients": 8},
    "model": {"name": "rationale", "hidden": 3},
    "train": {**TRAIN, "optimizer": {"lr": 0.02}},
}
FRIEDMAN = {
    "data": {"name": "friedman", "samples": 300, "test_samples": 80},
    "partition": {"kind": "iid", "clients": 6, "test_fraction": 0.2},
    "evaluate": {"clients": True},
}
RULES = {**FRIEDMAN, "model": {"name": "tsk"}, "train": {"rounds": 1}}
CLIENTS = {"partition": {"test_fraction": 0.2}, "evaluate": {"clients": True}}


def experiments(folder: Path) -> dict[str, dict[str, Any]]:
    """Sections of each experiment, by name."""
    documents = folder / "documents.txt"
    lines = [f"{c}\t{text} {k % 7} {k % 3}" for c, text in WORDS.items() for k in range(30)]
    documents.write_text("\n".join(lines))
    tasks = {
        "data": {"name": "text", "path": str(documents), "dimension": 7},
        "partition": {"kind": "own_tasks", "tasks": TASKS},
        "model": {"name": "text_cnn", "kernels": [1, 2], "filters": 3, "hidden": 5},
        "train": {**TRAIN, "participation": 0.7, "batch_size": 8}
        | {"optimizer": {"name": "adam", "lr": 0.01}},
    }
    found = {name: with_method(name, train=TRAIN) for name in NETWORK_METHODS}
    for name in ("fedavg", "local", "scaffold", "xpfl", "fedbabu"):
        found[f"{name}, clients' tests"] = with_method(name, train=TRAIN, **CLIENTS)
    for name in ("fedavg", "scaffold", "moon"):
        stacked = {"clients_per_step": 3}
        found[f"{name}, stacked"] = with_method(name, train=TRAIN, engine=stacked)
        resnet = {"name": "resnet8", "width": 2}
        found[f"{name}, resnet8"] = with_method(
            name, model=resnet, train={"rounds": 2, "optimizer": {"lr": 0.01}}
        )
    for name in ("fedavg", "scaffold"):
        found[f"{name}, private"] = with_method(
            name, train=TRAIN, privacy={"clip": 1, "noise_multiplier": 1}
        )
        momentum = {**TRAIN, "optimizer": {"lr": 0.02, "momentum": 0.9}}
        found[f"{name}, momentum"] = with_method(name, train=momentum)
        found[f"{name}, cnn"] = with_method(name, model={"name": "cnn"}, train=TRAIN)
    found["fedxds, local smoothgrad"] = with_method(
        "fedxds",
        train=TRAIN,
        method={"name": "fedxds", "warmup_rounds": 1, "attribute_with": "local"}
        | {"attribution": {"name": "smoothgrad", "samples": 2}},
    )
    found["xpfl, explained"] = with_method(
        "xpfl",
        train=TRAIN,
        devices={"packet_error": 0.2},
        method={"name": "xpfl", "psi": None}
        | {"xfed": {"every": 4, "images": 40, "perplexity": 5, "iterations": 300}},
    )
    for method in ("fedweit", "fedseit", "fedavg", "fedprox", "local"):
        found[f"{method}, tasks"] = {**tasks, "method": {"name": method}}
    found["fedseit, top_k"] = {**tasks, "method": {"name": "fedseit", "top_k": 2}}
    found["fedseit, share_dense"] = {**tasks, "method": {"name": "fedseit", "share_dense": True}}
    found["fedweit, as released"] = {
        **tasks,
        "method": {"name": "fedweit", "compat": {"frozen": True, "eval": True}},
    }
    for method in ("fedrnl", "fedavg", "moon", "feddyn", "fedbabu", "centralised", "fedprox"):
        found[f"{method}, rationales"] = {**REVIEWS, "method": {"name": method}}
    sampled = {**REVIEWS["model"], "evaluate": "sampled", "shared": True}
    found["fedavg, sampled rationales"] = {**REVIEWS, "model": sampled}
    for method in ("fedavg", "scaffold", "local", "centralised"):
        found[f"{method}, regression"] = {
            **FRIEDMAN,
            "method": {"name": method},
            "train": {**TRAIN, "optimizer": {"lr": 0.02}},
        }
    for method in ("openfl_xai", "centralised_rules", "local_rules"):
        found[f"{method}, tsk"] = {**RULES, "method": {"name": method}}
    return found


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        found = {
            name: run(small_experiment(**sections), folder).result_hash
            for name, sections in experiments(Path(folder)).items()
        }
    print(json.dumps(found, indent=2))
    known = json.loads(Path(sys.argv[1]).read_text()) if sys.argv[1:] else found
    changed = [name for name in {**known, **found} if known.get(name) != found.get(name)]
    for name in changed:
        print(f"{name}: {known.get(name)} -> {found.get(name)}", file=sys.stderr)
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
