"""Partitions against those of Flower Datasets, where it is installed.

Its pinned versions of other libraries do not agree with constraints.txt, hence it is not among the
requirements of the tests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedsim.data import Dataset, partitions
from fedsim.testing import small_experiment

theirs = pytest.importorskip("flwr_datasets.partitioner")
datasets = pytest.importorskip("datasets")


def class_counts(parts: list[NDArray[Any]], y: NDArray[Any]) -> NDArray[np.int64]:
    """(clients, classes) how many examples of each class every client holds."""
    return np.stack([np.bincount(y[part], minlength=10) for part in parts])


def ours(data: Dataset, seed: int, **section: Any) -> list[NDArray[Any]]:
    partition = partitions.parse(section)
    return [np.asarray(part) for part in partition.split(data, np.random.default_rng(seed))]


def flower_s(data: Dataset, partitioner: Any) -> list[NDArray[Any]]:
    rows = {"row": np.arange(len(data.y)), "label": data.y, "writer": data.y % 7}
    partitioner.dataset = datasets.Dataset.from_dict(rows)
    return [
        np.array(partitioner.load_partition(k)["row"]) for k in range(partitioner.num_partitions)
    ]


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return small_experiment().data.load()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("alpha", "clients", "least"), [(0.5, 10, 20), (0.1, 20, 1), (5.0, 30, 10)]
)
def test_dirichlet_gives_everyone_the_same_counts(
    digits: Dataset, seed: int, alpha: float, clients: int, least: int
) -> None:
    """To the example, as both draw the clients' shares of class after class."""
    section = {"kind": "dirichlet", "clients": clients, "alpha": alpha, "min_samples": least}
    found = class_counts(ours(digits, seed, **section), digits.y)
    theirs_of = theirs.DirichletPartitioner(clients, "label", alpha, least, seed=seed)
    try:
        parts = flower_s(digits, theirs_of)
    except ValueError:  # it stops after ten draws
        pytest.skip("Flower finds no partition with this seed")
    np.testing.assert_array_equal(found, class_counts(parts, digits.y))


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_pathological_divides_classes_alike(digits: Dataset, classes: int) -> None:
    """Who holds which class is drawn; into how many parts of which sizes it is cut is not."""
    section = {"kind": "pathological", "clients": 20, "classes_per_client": classes}
    found = class_counts(ours(digits, 0, **section), digits.y)
    partitioner = theirs.PathologicalPartitioner(20, "label", classes, "deterministic")
    expected = class_counts(flower_s(digits, partitioner), digits.y)
    assert ((found > 0).sum(axis=1) == classes).all()
    np.testing.assert_array_equal(np.sort(found, axis=0), np.sort(expected, axis=0))


def test_iid_parts_are_as_large_and_natural_groups_the_same(digits: Dataset) -> None:
    parts = flower_s(digits, theirs.IidPartitioner(7))
    assert sorted(map(len, ours(digits, 0, kind="iid", clients=7))) == sorted(map(len, parts))
    data = Dataset.of(digits.x, digits.y, digits.test_x, digits.test_y, writer=digits.y % 7)
    found = ours(data, 0, kind="natural", column="writer")
    parts = flower_s(data, theirs.NaturalIdPartitioner("writer"))
    assert {frozenset(part.tolist()) for part in found} == {
        frozenset(part.tolist()) for part in parts
    }
