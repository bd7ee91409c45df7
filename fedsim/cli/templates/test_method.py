from __future__ import annotations

from pathlib import Path

import numpy as np

from fedsim import Experiment, Run, run

FILE = Path(__file__).with_name("template.yaml")


def trained(folder: Path, *overrides: str) -> Run:
    return run(Experiment.load(FILE, ["engine.kind=local", *overrides]), folder)


def test_it_learns(tmp_path: Path) -> None:
    done = trained(tmp_path, "train.rounds=10")
    assert done.rounds["accuracy"].iloc[-1] > 0.6


def test_with_a_server_learning_rate_of_1_it_is_fedavg(tmp_path: Path) -> None:
    mine = trained(tmp_path, "train.rounds=2", "method.server_lr=1").weights()
    fedavg = trained(tmp_path, "train.rounds=2", "method={name: fedavg}").weights()
    for layer, weights in fedavg.items():
        np.testing.assert_allclose(mine[layer], weights, atol=1e-5)
