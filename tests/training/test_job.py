"""Settings of local training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsim.training import Train


@pytest.mark.parametrize(
    ("rounds", "fields", "rates"),
    [
        (3, {"lr_decay": 0.5}, [0.5, 0.25, 0.125]),
        (
            4,
            {"schedule": {"name": "cosine", "floor": 0.2}},
            [0.5 * (0.2 + 0.8 * (1 + np.cos(np.pi * k / 4)) / 2) for k in range(4)],
        ),
        (
            6,
            {"schedule": {"name": "step", "every": 2, "gamma": 0.5, "warmup": 2}},
            [0.5 / 3, 1 / 3, 0.5, 0.5, 0.25, 0.25],
        ),
        (3, {"lr_decay": 0.9, "schedule": {"warmup": 1}}, [0.25, 0.45, 0.405]),
    ],
)
def test_the_learning_rate_follows_its_schedule(
    rounds: int, fields: dict[str, Any], rates: list[float]
) -> None:
    section = Train.model_validate({"optimizer": {"lr": 0.5}, "rounds": rounds, **fields})
    np.testing.assert_allclose([section.lr(t) for t in range(1, rounds + 1)], rates)
