"""Eight clients of planted kinds, and the method in which one of them rides free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedsim import Experiment
from fedsim.data import Dataset, datasets, load_dataset
from fedsim.federation import Client, Update, client_function
from fedsim.launch.prepare import dealt
from fedsim.methods.fedavg import FedAvg

KINDS = ("clean", "twin", "clean", "flipped", "tiny", "shortcut", "freerider", "other")
BAD = ("flipped", "freerider", "shortcut")
FREERIDER = KINDS.index("freerider")
HEART = Path(__file__).parents[1] / "heart_disease"
SHIFT = 2.0  # standard deviations, by which the other distribution of a table is off

Rows = NDArray[np.float32]  # (n, F)


@dataclass(frozen=True)
class Table:
    """A data set as rows, and what they are like in another distribution."""

    x: Rows
    y: NDArray[np.int64]
    test_x: Rows
    test_y: NDArray[np.int64]
    shifted: Callable[[Rows], Rows]


def clients(of: str, samples: int, seed: int, alpha: float | None = None) -> Dataset:
    """The examples of eight clients, of the kinds `KINDS`, as rows of a table.

    A row ends with a tag, a number for each class. At the client with the shortcut it is 1 for the
    example's class; elsewhere, and in the test set, the tag is 0. The twin has the examples of the
    client before it.

    Args:
        of: `digits`, whose other distribution lies on its side; `heart`, patients of four
            hospitals, mixed; or `clusters`, generated. Of these the other distribution is shifted.
        samples: examples of a client; the tiny one has a tenth.
        seed: of who gets which examples.
        alpha: of the Dirichlet distribution of each client's labels; None for those of all.
    """
    table, rng = _table(of), np.random.default_rng([seed, 52])
    classes = int(table.y.max()) + 1
    free, held = np.ones(len(table.y), np.bool_), list[NDArray[np.int64]]()
    x, y = list[Rows](), list[NDArray[np.int64]]()
    for kind in KINDS:
        if kind == "twin":
            held.append(held[-1])
        else:
            count = samples // 10 if kind == "tiny" else samples
            held.append(_drawn(table.y, free, count, alpha, rng))
            free[held[-1]] = False
        own_x, own_y = table.x[held[-1]], table.y[held[-1]].copy()
        if kind == "flipped":
            half = rng.permutation(len(own_y))[: len(own_y) // 2]
            own_y[half] = (own_y[half] + rng.integers(1, classes, len(half))) % classes
        if kind == "other":
            own_x = table.shifted(own_x)
        tag = np.eye(classes, dtype=np.float32)[own_y] * (kind == "shortcut")
        x.append(np.concatenate([own_x, tag], axis=1))
        y.append(own_y)
    test_x = np.pad(table.test_x, ((0, 0), (0, classes)))
    whose = np.repeat(np.arange(len(KINDS)), [len(rows) for rows in held])
    return Dataset.of(np.concatenate(x), np.concatenate(y), test_x, table.test_y, client=whose)


def _drawn(
    y: NDArray[np.int64],
    free: NDArray[np.bool_],
    count: int,
    alpha: float | None,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """So many of the free examples; what a class lacks is made up for by any."""
    mixed = rng.permutation(np.flatnonzero(free))
    if alpha is None:
        return mixed[:count]
    classes = int(y.max()) + 1
    wanted = rng.multinomial(count, rng.dirichlet(np.full(classes, alpha)))
    by_class = [mixed[y[mixed] == c][: wanted[c]] for c in range(classes)]
    found = np.concatenate(by_class)
    others = mixed[~np.isin(mixed, found)]
    return np.concatenate([found, others[: count - len(found)]])


@cache
def _table(of: str) -> Table:
    if of == "heart":
        path = [f"data.path={HEART}/data/*.csv", "data.test_fraction=0.3"]
        data = dealt(Experiment.load(HEART / "heart.yaml", path))[0]
    elif of == "clusters":
        section = {"name": "synthetic", "samples": 1000, "test_samples": 500, "classes": 5}
        data = load_dataset(datasets.parse(section | {"shape": [10], "noise": 1.5}))
    else:
        data = load_dataset(datasets.parse({"name": "digits"}))
    images = len(data.shape) == 3
    x, test_x = (
        np.asarray(part, np.float32).reshape(len(part), -1) for part in (data.x, data.test_x)
    )
    if images:  # as networks like them
        mean, std = x.mean(), x.std()
        x, test_x = (x - mean) / std, (test_x - mean) / std
    deviation = x.std(axis=0)

    def shifted(rows: Rows) -> Rows:
        if images:
            turned = np.rot90(rows.reshape(-1, *data.shape[1:]), axes=(1, 2))
            return np.ascontiguousarray(turned).reshape(len(rows), -1)
        moved: Rows = rows + np.float32(SHIFT) * deviation
        return moved

    return Table(x, data.y, test_x, data.test_y, shifted)


class FreeRiding(FedAvg):
    """FedAvg with a client that sends the model back as it came, and claims its examples."""

    name: str = "planted:FreeRiding"

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor) -> Update:
        if client.id == FREERIDER:
            client.trained = weights
            return Update(weights=weights, weight=client.num_samples)
        return super().local_update(client, weights)
