"""Runs that end in seconds, and a Ray of our own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from small import HERE, small_experiment

from fedsim import Run, run


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
