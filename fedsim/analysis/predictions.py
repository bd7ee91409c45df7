"""Predictions of a finished run's models for the test set."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedsim.analysis.replay import ModelSnapshot, Whose
from fedsim.config.arguments import checked
from fedsim.federation.context import TEST_SHARD
from fedsim.models import RuleModel
from fedsim.objectives.metrics import probabilities
from fedsim.objectives.objective import EVALUATION_BATCH
from fedsim.results.run import Run
from fedsim.support.rng import keyed_torch_rng

if TYPE_CHECKING:
    import pandas as pd


@checked
def predictions(
    run: Run | str | Path,
    client: int | None = None,
    after: int | None = None,
    of: Whose | None = None,
) -> pd.DataFrame:
    """The predictions of the global model, or a client's model, for the test set.

    The model is read from the run's saved weights, and the test set is loaded from the run's data
    source. Rounds are repeated only for models of earlier rounds, and for models that clients did
    not keep.

    Args:
        run: a finished run, or its folder.
        client: the client whose model is used; None for the global model.
        after: use the model after this round; by default the last.
        of: which of the client's models: `cohort`, as it was trained and sent; or `personal`, with
            which it predicts, the default of methods with personal models.

    Returns:
        One row per example of the central test set, with its index `row` and its `target`. For
        classification, `target` and `prediction` are class names, and `probability/<class>` is the
        softmax of the outputs. For regression, `prediction` is in the units of the data set (with
        `scale: minmax`, `Dataset.target_scaling.undo` converts it to the units of the file). For
        other targets, `target/<k>` and `output/<k>` are given, the network's raw outputs. In
        continual learning, only the examples of the client's task in that round.

    Raises:
        BadInput: the run is not finished, its data has changed, or there is no such model.

    Example:
        >>> import fedsim
        >>> run = fedsim.load(folder)
        >>> found = fedsim.predictions(run)
        >>> accuracy = (found["target"] == found["prediction"]).mean()
        >>> bool(accuracy == run.rounds["accuracy"].iloc[-1])
        True
        >>> wrong = found[found["target"] != found["prediction"]]  # the rows to look at
        >>> own = fedsim.predictions(run, client=3)  # of the model that client 3 trained last
    """
    import pandas as pd

    model = ModelSnapshot.of(run, client, after, of=of)
    data, y = model.dataset, model.dataset.test_y
    outputs = _outputs(model)
    rows = np.arange(len(y))
    if model.labels is not None:  # other classes are not predicted
        rows = np.flatnonzero(np.isin(y, model.labels))
        outputs, y = outputs[rows], y[rows]
    columns: dict[str, NDArray[Any]] = {"row": rows}
    if data.classes:
        names, p = np.array(data.classes), probabilities(outputs)
        columns |= {"target": names[y], "prediction": names[outputs.argmax(axis=1)]}
        columns |= {f"probability/{name}": p[:, c] for c, name in enumerate(data.classes)}
    elif y.ndim == 1 and outputs.size == len(y):
        columns |= {"target": y, "prediction": outputs.reshape(-1).astype(np.float64)}
    else:
        for what, array in (("target", y), ("output", outputs)):
            flat = array.reshape(len(y), -1)
            columns |= {f"{what}/{k}": flat[:, k] for k in range(flat.shape[1])}
    return pd.DataFrame(columns)


@torch.no_grad()
def _outputs(model: ModelSnapshot) -> NDArray[Any]:
    again = model.again
    if isinstance(again.spec.model, RuleModel):
        assert isinstance(model.own, dict)
        table, _ = again.fed.server.test_data.table
        values: NDArray[Any] = again.spec.model.predict(model.own, table).values
        return values
    network, objective, found = model.explained().as_network(), again.spec.objective, []
    M, device = len(model.dataset.test_y), again.runner.context.device
    for shard in range(math.ceil(M / TEST_SHARD)):
        # For networks that draw random numbers in evaluation: the same as in the run.
        with keyed_torch_rng(again.spec.seed, "test/torch", again.after, shard, device):
            start = shard * TEST_SHARD
            x = again.runner.context.test_batch(slice(start, start + TEST_SHARD)).x
            for part in torch.split(x, EVALUATION_BATCH):
                found.append(objective.predictions(objective.outputs(network, part)).cpu())
    return torch.cat(found).numpy()
