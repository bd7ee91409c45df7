"""Experiments that run in seconds, and a Ray of our own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from fedsim import Experiment, Run, run

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


@pytest.fixture
def finish(tmp_path: Path) -> Callable[..., Run]:
    """Run a small experiment to its end, below the test's own folder."""

    def finish(**sections: Any) -> Run:
        return run(small_experiment(**sections), tmp_path / "runs")

    return finish


@pytest.fixture(scope="class")
def own_ray() -> Iterator[None]:
    """A private Ray with four CPUs and one logical GPU, which has no card behind it."""
    ray.init(
        num_cpus=4,
        num_gpus=1,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env=HERE,
        logging_level=logging.ERROR,
    )
    yield
    ray.shutdown()
