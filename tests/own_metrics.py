"""Metrics as a user would write them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import fbeta_score


def f2(outputs: NDArray[Any], targets: NDArray[Any]) -> float:
    return float(fbeta_score(targets, outputs.argmax(axis=1), beta=2, average="macro"))


def extremes(outputs: NDArray[Any], targets: NDArray[Any]) -> dict[str, float]:
    """Several at once."""
    return {"least": float(outputs.min()), "greatest": float(outputs.max())}


def error_rate(outputs: NDArray[Any], targets: NDArray[Any]) -> float:
    return float((outputs.argmax(axis=1) != targets).mean())


error_rate.best = "min"  # type: ignore[attr-defined]


def strange(outputs: NDArray[Any], targets: NDArray[Any]) -> float:
    return 0.0


strange.best = "least"  # type: ignore[attr-defined]


def coverage(outputs: NDArray[Any], targets: NDArray[Any]) -> float:
    return 0.0


def loss(outputs: NDArray[Any], targets: NDArray[Any]) -> float:
    return 0.0


def fails(outputs: NDArray[Any], targets: NDArray[Any]) -> float:
    return float(np.zeros(2)[3])


def word(outputs: NDArray[Any], targets: NDArray[Any]) -> str:
    return "good"


def vector(outputs: NDArray[Any], targets: NDArray[Any]) -> NDArray[Any]:
    return outputs.argmax(axis=1) == targets


def undefined(outputs: NDArray[Any], targets: NDArray[Any]) -> float:
    return float("nan")


NUMBER = 7

# Names of columns that rounds have without any metric.
RESERVED = ("train_loss", "validation_f2", "client_f2", "worst_client_f2", "seconds", "bytes_up")
RESERVED += ("bytes_down", "round", "clients", "epsilon")
globals().update(dict.fromkeys(RESERVED, undefined))
