"""Folders as runs, grids and searches leave them, made of figures: nothing is trained.

All figures are worked out here, so that they are the same on any processor.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from safetensors.numpy import save_file

from experiments import small_experiment
from fedsim.objectives import Metric
from fedsim.results.folder import FINAL_WEIGHTS, GridFolder, RunFolder, SearchFolder

CLIENTS, ROUNDS = 6, 6
ACCURACY = (Metric("accuracy", "accuracy", primary=True), Metric("loss", "loss", best="min"))
# What else a manifest says of where and when.
FACTS: dict[str, Any] = {
    "created": "2026-01-02T03:04:05+0000",
    "git_revision": None,
    "python": "3.11",
    "packages": {"fedsim": "1.0"},
    "hardware": {"machine": "x86_64", "cpus": 2, "gpus": []},
}

Cell = tuple[dict[str, Any], int, Path | None]  # its axes, a seed, and the run if there is one


def rising(last: float, first: float = 0.1, rounds: int = ROUNDS) -> list[float]:
    """Scores that come closer and closer to the last."""
    return [last + (first - last) * 0.5**t for t in range(rounds - 1)] + [last]


def made_run(
    path: Path,
    scores: Mapping[str, Sequence[float]],
    *,
    metrics: Sequence[Metric] = ACCURACY,
    clients: pd.DataFrame | None = None,
    facts: Mapping[str, Any] | None = None,
    **sections: Any,
) -> Path:
    """The folder of a run.

    Args:
        scores: columns of its rounds.
        clients: its table of clients.
        facts: what its manifest says otherwise.
        sections: of its experiment.
    """
    text, alpha = _experiment(json.dumps(sections))
    about = {
        **{"clients": CLIENTS, "actors": 0, "clients_per_step": 1},
        **{"metrics": [asdict(metric) for metric in metrics], "wall_seconds": 61.0},
        **{"result_hash": f"result-{path.name}", "data_hash": "data"},
        **{"partition_hash": f"partition-{alpha}", "seed": sections.get("seed", 0)},
    }
    folder = RunFolder.make(path, text, about)
    length = max(map(len, scores.values()), default=0)
    if length:
        sent = 96_400 * np.arange(1, length + 1)
        rounds = {
            **{"round": np.arange(1, length + 1), **scores},
            **{"total_bytes_up": sent, "total_bytes_down": sent, "seconds": 0.5},
        }
        pd.DataFrame(rounds).to_parquet(path / "rounds.parquet")
    if clients is not None:
        clients.to_parquet(path / "clients.parquet")
    labels(10 if alpha is None or alpha < 1 else 20).to_parquet(path / "labels.parquet")
    (path / "weights").mkdir()
    save_file({}, path / FINAL_WEIGHTS, metadata={"parameters": "2410", "layers": "[]"})
    folder.update(**{**FACTS, "status": "finished", **(facts or {})})
    return path


@cache
def _experiment(sections: str) -> tuple[str, Any]:
    """The file of an experiment, and the α of its partition."""
    made = small_experiment(**json.loads(sections))
    return made.to_yaml(), made.model_dump()["partition"].get("alpha")


def labels(examples: int) -> pd.DataFrame:
    """Who holds which labels: each client those of three digits, the last ones most of all."""
    names = [str(digit) for digit in range(10)]
    rows = [(k, names[(k + n) % 10], examples * (k + 1)) for k in range(CLIENTS) for n in range(3)]
    table = pd.DataFrame(rows, columns=["client", "label", "examples"])
    table["label"] = pd.Categorical(table["label"], categories=names)
    return table


def client_rows(rounds: int = ROUNDS, **tested: Sequence[float]) -> pd.DataFrame:
    """A row for each client of each round.

    Args:
        tested: by column, the mean over clients in each round; they lie 0.05 apart.
    """
    t, k = np.divmod(np.arange(rounds * CLIENTS), CLIENTS)
    rows = {"round": t + 1, "client": k, "samples": 100 + k, "loss": 1 / (t + k + 1)}
    for column, means in tested.items():
        rows[column] = np.asarray(means)[t] + 0.05 * (k - 2.5)
    return pd.DataFrame(rows)


def classification(path: Path, last: float, rounds: int = ROUNDS, **about: Any) -> Path:
    """A run whose clients were tested, with the accuracy that it comes to."""
    accuracy = np.array(rising(last, rounds=rounds))
    scores = {
        **{"accuracy": accuracy, "loss": 2 - 2 * accuracy, "train_loss": 1 - accuracy},
        **{"client_accuracy": accuracy, "worst_client_accuracy": accuracy - 0.125},
    }
    clients = client_rows(rounds, test_accuracy=accuracy)
    return made_run(path, scores, **{"clients": clients, **about})


def made_grid(path: Path, cells: Iterable[Cell], content: str = "", **facts: Any) -> Path:
    """The folder of a grid, with copies of the runs that there are; those without one failed.

    Args:
        content: of its experiment.
        facts: what its manifest says besides.
    """
    rows: list[dict[str, Any]] = []
    for number, (cell, seed, run) in enumerate(cells):
        folder = f"cells/{number}/seed-{seed}"
        row = {"cell": cell, "seed": seed, "folder": folder, "status": "finished", "error": None}
        if run is None:
            row |= {"status": "failed", "error": "client 3, round 2, local_update: <boom>"}
        else:
            shutil.copytree(run, path / folder)
        rows.append(row)
    name = path.parent.name
    about = {"name": name, "axes": list(rows[0]["cell"]), "cells": rows}
    folder = GridFolder.make(path, content or f"name: {name}\n", about)
    folder.update(**{**FACTS, "status": "finished", **facts})
    return path


def made_search(path: Path, objectives: Mapping[str, str], **tables: pd.DataFrame) -> Path:
    """The folder of a finished search, with its tables."""
    name = path.parent.name
    facts = {"name": name, "objectives": dict(objectives), "space": ["lr"]}
    folder = SearchFolder.make(path, f"name: {name}\n", facts)
    for table, content in tables.items():
        content.to_parquet(path / f"{table}.parquet")
    folder.update(**FACTS, status="finished")
    return path
