from __future__ import annotations

from pathlib import Path

import numpy as np

from fedsim import Experiment, run

from template import CLASSES, Template

FILE = Path(__file__).with_name("template.yaml")


def test_it_loads_the_same_each_time() -> None:
    data, again = Template().load(), Template().load()
    np.testing.assert_array_equal(data.x, again.x)
    assert len(data.x) == len(data.y) == len(data.columns["hospital"])
    assert set(data.y) | set(data.test_y) == set(range(len(CLASSES)))


def test_it_can_be_learnt(tmp_path: Path) -> None:
    experiment = Experiment.load(FILE, ["engine.kind=local"])
    assert run(experiment, tmp_path).rounds["accuracy"].iloc[-1] > 0.7
