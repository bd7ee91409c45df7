"""Inputs that others are compared with when they are explained."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedsim.config.registry import Config
from fedsim.data import Dataset
from fedsim.data.dataset import as_dtype
from fedsim.data.stored import AnyArray, StoredArray
from fedsim.errors import ExperimentError
from fedsim.explain.explainer import ExplainedData


class Reference(Config):
    """A row of the central test set.

    Args:
        reference: its number, counted from 0.
    """

    reference: int = Field(ge=0)


Baseline = Literal["zero", "mean", "median", "clients"] | Reference


def baseline_of(choice: Baseline, data: ExplainedData) -> Tensor:
    """(1, ...) the baseline, as the network takes it.

    Raises:
        ExperimentError: the data have no such baseline.
    """
    dataset = data.dataset
    if dataset.words:
        raise ExperimentError("baseline: documents have none but zero")
    if isinstance(choice, Reference):
        if choice.reference >= len(dataset.test_y):
            raise ExperimentError(
                f"baseline.reference={choice.reference}: the test set has "
                f"{len(dataset.test_y)} rows, counted from 0"
            )
        return data.prepare(dataset.test_x[[choice.reference]])
    if choice == "zero":
        return data.prepare(dataset.test_x[:1]) * 0
    rows = np.arange(dataset.num_loaded)
    if data.splits is not None:
        rows = data.splits.train.values
    if choice == "median":
        if isinstance(dataset.x, StoredArray):
            raise ExperimentError("baseline=median: the inputs stay in their files; take mean")
        found = np.median(dataset.x[rows], axis=0)
    elif choice == "mean":
        found = _mean(dataset.x, rows)
    else:
        if data.splits is None:
            raise ExperimentError("baseline=clients: the clients are not known here; take mean")
        found = np.mean([_mean(dataset.x, own) for own in data.splits.train], axis=0)
    return data.prepare(as_dtype(found[None], dataset.x.dtype))


def _mean(x: AnyArray, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    if not isinstance(x, StoredArray):
        return np.mean(x[rows], axis=0, dtype=np.float64)
    total = sum(part.sum(axis=0, dtype=np.float64) for part in x.chunks(rows))
    return np.asarray(total / len(rows))


def in_file(choice: Baseline) -> str:
    """What names of files say of a baseline."""
    if choice == "zero":
        return ""
    return f"-baseline-{f'row-{choice.reference}' if isinstance(choice, Reference) else choice}"


def in_words(choice: Baseline, data: Dataset) -> str:
    if isinstance(choice, Reference):
        return f"row {choice.reference} of the test set"
    if choice == "clients":
        return "the mean of the clients' mean inputs"
    if choice != "zero":
        return f"the {choice} of the training inputs"
    if data.words:
        return "the document without the word"
    images = len(data.shape) == 3
    if data.mean:
        return f"zero, the mean {'pixel' if images else 'input'} of the data"
    if images:
        return "zero, a black image" if data.x.dtype == np.uint8 else "zero in every pixel"
    if data.scaling.zero:
        categories = " and no category" if data.parts is not None else ""
        return f"zero, {data.scaling.zero}{categories}"
    return "zero in every feature"
