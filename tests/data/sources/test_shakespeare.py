"""LEAF's Shakespeare: the next character of what a role says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedsim.data import Dataset
from fedsim.data.sources.text import LETTERS, Shakespeare
from fedsim.explain.inputs import Inputs

SPEECH = "Now is the winter of our discontent, made glorious summer by this sun of York; " * 4


def says(speech: str, count: int) -> tuple[list[str], list[str]]:
    """The examples of a user, as LEAF makes them: each begins a character later."""
    return [speech[i : i + 80] for i in range(count)], [speech[i + 80] for i in range(count)]


def said(data: Dataset, x: Any) -> list[str]:
    return ["".join(data.words[token] for token in row) for row in x]


def test_train_and_test_folders(write: Any, tmp_path: Path) -> None:
    folder = tmp_path / "shakespeare/data"
    first, second = says(SPEECH, 5), says(SPEECH.upper(), 3)
    write.leaf(folder / "train/all_data_niid_0_train_8.json", {"GLOUCESTER": first})
    write.leaf(folder / "train/all_data_niid_1_train_8.json.gz", {"CLARENCE": second})
    write.leaf(folder / "test/all_data_niid_0_test_8.json", {"CLARENCE": says("é" * 81, 1)})
    data = Shakespeare(root=tmp_path).load()
    assert (data.x.shape, data.x.dtype, data.y.dtype) == ((8, 80), np.int32, np.int64)
    assert said(data, data.x) == [*first[0], *second[0]]
    assert [data.classes[y] for y in data.y] == [*first[1], *second[1]]
    assert data.columns["user"].tolist() == ["GLOUCESTER"] * 5 + ["CLARENCE"] * 3
    assert data.classes == (*LETTERS, "é")
    assert (len(LETTERS), data.test_y.tolist()) == (80, [80])
    np.testing.assert_array_equal(data.vectors[data.x[0, 0]], np.arange(81) == LETTERS.index("N"))
    assert not data.vectors[:2].any()


def test_no_character_to_predict_is_in_an_example_to_train_on(write: Any, tmp_path: Path) -> None:
    x, y = says(SPEECH, 200)
    write.leaf(tmp_path / "all_data/all_data.json", {"A": (x, y), "B": (x[:100], y[:100])})
    data = Shakespeare(root=tmp_path, test_fraction=0.25).load()
    assert said(data, data.test_x) == [*x[150:], *x[75:100]]
    # Of A, the examples before 150 - 79: the character after the last of them is the last
    # character before those that the first test example is to predict from.
    assert said(data, data.x) == x[:71]
    assert set(data.columns["user"]) == {"A"}


def test_own_texts_are_parted_into_characters(write: Any, tmp_path: Path) -> None:
    for part in ("train", "test"):
        write.leaf(tmp_path / f"{part}/all_data.json", {"A": says(SPEECH, 2)})
    data = Shakespeare(root=tmp_path).load()
    assert Inputs.of_texts(data, ["To be."], ["line"]).words == (tuple("To be."),)
