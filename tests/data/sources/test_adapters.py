"""Data sets of PyTorch and of Hugging Face, as functions return them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import other_data
import pytest
from pydantic import ValidationError

from experiments import small_experiment
from fedsim import Experiment
from fedsim.data import Dataset, datasets, load_dataset
from fedsim.errors import DataError, FedsimError

SMALL = small_experiment().model_dump(mode="json")


def load(function: str, **keys: Any) -> Dataset:
    return load_dataset(datasets.parse({"name": f"other_data:{function}", **keys}))


class TestTorch:
    @pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("P", 3), ("L", 1), ("I", 1)])
    def test_images_of_pillow(self, mode: str, channels: int) -> None:
        data = load("labelled_pictures", mode=mode)
        assert data.x.dtype == (np.float32 if mode == "I" else np.uint8)
        assert data.shape == (channels, 4, 6)
        assert data.classes == ("cat", "dog")
        assert (len(data.y), len(data.test_y)) == (8, 2)
        if mode != "P":
            np.testing.assert_array_equal(data.x[:, 0, 3, 5] % 2, data.y)
        if mode == "RGB":
            assert data.x[0, 1:, 2, 2].tolist() == [1, 2]

    def test_classes_are_found_below_a_subset(self) -> None:
        data = load("subset", test_fraction=0.4)
        assert data.classes == ("cat", "dog")
        assert sorted([*data.x[:, 0, 0, 0], *data.test_x[:, 0, 0, 0]]) == [0, 1, 4, 5, 7]
        assert len(data.test_y) == 2

    def test_tensors(self) -> None:
        data = load("tensors", test_fraction="mine")
        assert data.x.dtype == np.float32
        np.testing.assert_array_equal(data.x[:, 0] // 2 % 2, data.y)
        assert (data.y.dtype, data.classes) == (np.int64, ("0", "1"))

    def test_a_pair_of_regressions(self) -> None:
        data = load("rates")
        assert data.classes == ()
        assert data.y.tolist() == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]
        assert (data.test_x.tolist(), data.test_y.tolist()) == ([[1.5, 2.5]], [0.25])

    def test_given_as_an_object(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FEDSIM_DATA", str(tmp_path))
        given = Experiment.from_dict({**SMALL, "data": other_data.tensors()}).data
        named = load("tensors")
        kept = load_dataset(given)
        for field in ("x", "y", "test_x", "test_y"):
            np.testing.assert_array_equal(getattr(kept, field), getattr(named, field))
        pair = Experiment.from_dict({**SMALL, "data": other_data.rates()}).data
        assert len(load_dataset(pair).test_y) == 1


class TestHuggingFace:
    def test_columns(self) -> None:
        data = load("table")
        assert (data.shape, data.x.dtype) == ((3, 4, 6), np.uint8)
        assert data.classes == ("no", "yes")
        assert list(data.columns) == ["site", "age"]  # notes are missing in a row
        np.testing.assert_array_equal(data.columns["age"], data.x[:, 0, 0, 0])
        assert set(data.columns["site"].tolist()) <= set("abcde")

    def test_splits_and_labels_of_text(self) -> None:
        data = load("splits", x="pixels", y="kind")
        assert data.classes == ("a", "b", "c")
        assert data.y.tolist() == data.test_y.tolist() == [1, 0, 0, 2]
        assert data.x.tolist() == [[0, 2.5], [1, 2.5], [2, 2.5], [3, 2.5]]

    def test_a_transform_of_the_user_is_kept(self) -> None:
        assert load("transformed").shape == (3, 2, 2)


@pytest.mark.parametrize("which", other_data.WRONG)
def test_what_cannot_be_read(which: str) -> None:
    with pytest.raises(DataError, match=other_data.WRONG[which][1]) as caught:
        load("wrong", which=which)
    assert str(caught.value).startswith("other_data:wrong")


def test_keys_that_have_no_use() -> None:
    with pytest.raises(DataError, match=r"data\.y: names a column, and items of .* have none"):
        load("subset", y="label")
    with pytest.raises(DataError, match=r"data\.x: other_data:own takes no 'x', and returns a D"):
        load("own", x="image")
    with pytest.raises(ValidationError, match="other_data:own takes no 'z'"):
        load("own", z=1)
    with pytest.raises(FedsimError, match=r"data\.test_fraction: .*less than 1"):
        Experiment.from_dict({**SMALL, "data": {"name": "other_data:own", "test_fraction": 2}})
