from __future__ import annotations

from pathlib import Path

import torch

from fedsim import Experiment, run

from template import network

FILE = Path(__file__).with_name("template.yaml")


def test_it_returns_a_number_for_each_class() -> None:
    images = torch.zeros(5, 1, 8, 8)
    assert network(images.shape[1:], outputs=10)(images).shape == (5, 10)


def test_it_learns(tmp_path: Path) -> None:
    experiment = Experiment.load(FILE, ["engine.kind=local", "train.rounds=10"])
    assert run(experiment, tmp_path).rounds["accuracy"].iloc[-1] > 0.6
