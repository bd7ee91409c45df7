"""Functions that return data sets of PyTorch, or a stand-in for Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, Subset, TensorDataset

from fedsim.data import Dataset


class Items(TorchDataset[Any]):
    """Any items, as a map-style data set."""

    classes = ("cat", "dog")

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


class Table:
    """As much of `datasets.Dataset` as fedsim uses."""

    def __init__(self, names: tuple[str, ...] = (), form: str = "", **columns: Any) -> None:
        self.columns = columns
        self.features = dict.fromkeys(columns, SimpleNamespace())
        if names:
            self.features["label"].names = list(names)
        self.format = {"type": form}

    def with_format(self, form: None) -> Table:
        found = Table(form="plain", **self.columns)
        found.features = self.features
        return found

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, i: int) -> dict[str, Any]:
        assert self.format["type"] in ("plain", "custom"), "rows are read in a format"
        return {name: values[i] for name, values in self.columns.items()}


def pictures(mode: str = "RGB", count: int = 10) -> list[Any]:
    from PIL import Image

    return [Image.new(mode, (6, 4), (i, 1, 2) if mode == "RGB" else i) for i in range(count)]


def labelled_pictures(mode: str = "RGB") -> TorchDataset[Any]:
    return Items([(image, i % 2) for i, image in enumerate(pictures(mode))])


def subset() -> TorchDataset[Any]:
    return Subset(labelled_pictures(), [0, 1, 4, 5, 7])


def tensors(test_fraction: str = "") -> TorchDataset[Any]:
    """With an argument that is called like a key of the section."""
    assert test_fraction in ("", "mine")
    return TensorDataset(torch.arange(20.0).reshape(10, 2), torch.arange(10) % 2)


def rates() -> tuple[TorchDataset[Any], TorchDataset[Any]]:
    """A regression; one of the targets happens to be an int."""
    train = Items([(np.array([i, i + 1]), i / 2 if i else 0) for i in range(8)])
    return train, Items([(torch.tensor([1.5, 2.5]), torch.tensor(0.25))])


def table() -> Table:
    return Table(
        ("no", "yes"),
        image=pictures(),
        label=[0, 1] * 5,
        site=list("aabbccddee"),
        age=range(10),
        notes=[None, *"bcdefghij"],
    )


def splits() -> dict[str, Table]:
    part = {"pixels": [[i, 2.5] for i in range(4)], "kind": ["b", "a", "a", "c"]}
    return {"train": Table(**part), "validation": Table(**part), "test": Table(**part)}


def transformed() -> Table:
    return Table(form="custom", img=torch.ones(6, 3, 2, 2), label=[0, 1] * 3)


def own() -> Dataset:
    return Dataset.of(np.ones((10, 2)), np.arange(10) % 2)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


PAIR, NAN = (np.zeros(2), 0), np.full(2, np.nan)
HALVES = Items([(np.zeros(2), 0.5)])
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "endless": (Endless, "Endless has no length or no items by index; return a map-style"),
    "empty": (lambda: Items([]), "Items has no item"),
    "no_pair": (lambda: Items([PAIR, (1, 2, 3)]), r"item 1 is a tuple, expected a pair"),
    "text": (lambda: Items([("ab", 0)]), "x of item 0 is text; write it to a file and read it"),
    "ragged": (lambda: Items([([[1], [1, 2]], 0)]), "x of item 0 is not an array"),
    "scalar": (lambda: Items([(1.0, 0)]), "x of item 0 is a float, expected a tensor, an arr"),
    "shapes": (
        lambda: Items([PAIR, (np.zeros(3), 0)]),
        r"x of item 1 is float32 of shape \(3,\), of item 0 float32 of \(2,\)",
    ),
    "many_labels": (
        lambda: Items([(np.zeros(2), [0, 1])]),
        "y of item 0 is a list, expected a nu",
    ),
    "mixed": (lambda: Items([PAIR, (np.zeros(2), "a")]), "some labels are text and some numb"),
    "range": (lambda: Items([(np.zeros(2), 2)]), "range from 2 to 2 with 2 classes"),
    "below": (lambda: Items([(np.zeros(2), -1)]), "range from -1 to -1 with 2 classes"),
    "nan": (lambda: (HALVES, Items([(NAN, 0.5)])), "test_x has NaN or infinite values"),
    "types": (lambda: (Items([PAIR]), HALVES), "labels of train and test are of different types"),
    "no_inputs": (lambda: Table(a=[1], label=[0]), "set data.x to the column of inputs; there"),
    "no_label": (lambda: Table(img=[[1]], labels=[0]), "no column 'label' for data.y; did you"),
    "no_train": (lambda: {"test": Table(img=[[1]], label=[0])}, "has no 'train' but test"),
}


def wrong(which: str) -> Any:
    return WRONG[which][0]()
