"""Memory of eight actors that adapt one backbone: python backbone.py

A BERT of 100 million random weights with adapters of rank 8; eight clients, an actor each, train
on short reviews. Prints the proportional memory of all client actors together in MB by what it is:
in Ray's object store, where the backbone lies once for the node; of files, which is libraries; and
the actors' own. It is the most in any sample from the end of the first round on; beside it the
same with a BERT of two small layers, which is what actors need anyway.
"""

from __future__ import annotations

import json
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil
from transformers import BertConfig

import fedsim

ROUNDS = 2
SIZES: dict[str, dict[str, int]] = {
    "100 million weights": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": 20_000,
    },
    "small": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 1_000,
    },
}


def actors_megabytes() -> dict[str, float]:
    """Proportional memory of the client actors: in the object store, of files, and their own."""
    found = dict.fromkeys(("actors", "stored", "file", "own"), 0.0)
    for process in psutil.process_iter():
        try:
            if not " ".join(process.cmdline()).startswith("ray::ClientActor"):
                continue
            maps = process.memory_maps()
        except psutil.Error:  # it ended a moment ago
            continue
        found["actors"] += 1
        for each in maps:
            stored = each.path.startswith("/dev/shm/plasma")
            kind = "stored" if stored else "file" if each.path.startswith("/") else "own"
            found[kind] += each.pss / 1e6
    return found


def measured(size: str, folder: Path) -> dict[str, float]:
    """The most that all actors together took in any sample from the second round on."""
    BertConfig(max_position_embeddings=64, **SIZES[size]).save_pretrained(folder / size)
    experiment: dict[str, Any] = {
        "name": "backbone",
        "data": {
            "name": "planted_reviews",
            "reviews": 64,
            "tokenizer": {"kind": "wordpiece", "size": 1000},
            "length": 32,
        },
        "partition": {"kind": "iid", "clients": 8},
        "model": {
            "name": "hf",
            "checkpoint": str(folder / size),
            "task": "sequence_classification",
            "init": "random",
        },
        "adapters": {"r": 8},
        "method": {"name": "fedavg"},
        "train": {"rounds": ROUNDS, "batch_size": 4, "optimizer": {"lr": 0.01}},
        "engine": {"kind": "ray", "actors": 8},
        "evaluate": {"every": ROUNDS},
    }
    samples: list[dict[str, float]] = []
    seconds: list[float] = []
    begun, ended = threading.Event(), threading.Event()

    def sample() -> None:
        begun.wait()
        while not ended.wait(0.1):
            samples.append(actors_megabytes())

    def watch(event: Any) -> None:
        if isinstance(event, dict):
            seconds.append(event["seconds"])
            begun.set()

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        fedsim.run(experiment, folder / "runs", watch)
    finally:
        begun.set()
        ended.set()
        sampler.join()
    whole = [each for each in samples if each["actors"] == 8]
    most = max(whole, key=lambda each: each["stored"] + each["file"] + each["own"])
    return {**most, "first round": seconds[0], "samples": len(whole)}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for size in SIZES:
            print(
                size, json.dumps({k: round(v, 1) for k, v in measured(size, Path(folder)).items()})
            )


if __name__ == "__main__":
    main()
