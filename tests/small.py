"""Experiments that run in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedsim import Experiment

# Actors find the modules of the tests.
HERE = {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}}


def small_experiment(**sections: Any) -> Experiment:
    """Ten clients that learn ten digits for ten rounds.

    Sections given extend these; a section that names another component replaces it.
    """
    content: dict[str, Any] = {
        "name": "small",
        "data": {"name": "digits"},
        "partition": {"kind": "dirichlet", "clients": 10, "alpha": 0.5},
        "model": {"name": "mlp", "hidden": [32]},
        "method": {"name": "fedavg"},
        "train": {"rounds": 10, "local_epochs": 1, "batch_size": 16, "optimizer": {"lr": 0.1}},
        "engine": {"kind": "local"},
    }
    for name, section in sections.items():
        known = content.get(name, {})
        named = isinstance(section, dict) and not {"name", "kind"}.isdisjoint(section)
        content[name] = (
            {**known, **section} if isinstance(section, dict) and not named else section
        )
    return Experiment.from_dict(content)
