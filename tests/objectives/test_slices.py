"""How the central test set is cut up for scoring: by what the data say, whatever is scored."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedsim.data import ClientSplits, Dataset, Ragged
from fedsim.objectives import Batch, Objective, Regression, default_objective
from fedsim.objectives.slices import Whole, slices_of

X = np.arange(12, dtype=np.float32).reshape(6, 2)
PLACES = np.array(["north", "south", "north", "south", "north", "north"])
CLASSES = Dataset(X, np.arange(6) % 2, X, np.arange(6) % 2, ("no", "yes"))
NUMBERS = Dataset(X, X[:, 0].astype(float), X, X[:, 0] ** 2 / 9, ())
NOBODY = ClientSplits(Ragged.of([]), Ragged.of([]), Ragged.of([]))


def scores(objective: Objective, data: Dataset) -> dict[str, float]:
    torch.manual_seed(0)
    network = nn.Linear(2, objective.num_outputs(data))
    batch = Batch(torch.from_numpy(data.test_x), torch.from_numpy(data.test_y))
    slices = slices_of(objective, data, NOBODY)
    return slices.scores(slices.totals(network, batch, 0), 0)[0]


@pytest.mark.parametrize("data", [CLASSES, NUMBERS])
def test_the_column_that_the_data_name(data: Dataset) -> None:
    objective = default_objective(data)
    column = "r2" if isinstance(objective, Regression) else "accuracy"
    placed = replace(data, test_columns={"place": PLACES, "other": PLACES[::-1]})
    assert isinstance(slices_of(objective, placed, NOBODY), Whole)
    whole, cut = scores(objective, data), scores(objective, replace(placed, sliced_by="place"))
    assert {name: cut[name] for name in whole} == pytest.approx(whole)
    assert cut.keys() - whole.keys() == {f"{column}/north", f"{column}/south"}
    for place in ("north", "south"):
        own = place == PLACES
        part = replace(data, test_x=data.test_x[own], test_y=data.test_y[own])
        assert cut[f"{column}/{place}"] == pytest.approx(scores(objective, part)[column])
