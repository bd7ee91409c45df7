"""`data.subset` and `data.test_subset`: some of the examples, of any data set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import small_experiment
from fedsim import Run
from fedsim.data import Dataset, datasets, load_dataset
from fedsim.data.stored import StoredArray
from fedsim.launch.prepare import prepare


def load(**section: Any) -> Dataset:
    return load_dataset(datasets.parse({"name": "digits", **section}))


def rows_of(part: Any, whole: Any) -> list[int]:
    """Where examples, none of which occurs twice, are in the whole."""
    places = {np.asarray(x).tobytes(): i for i, x in enumerate(np.asarray(whole))}
    return [places[np.asarray(x).tobytes()] for x in np.asarray(part)]


@pytest.mark.parametrize("part", ["", "test_"])
@pytest.mark.parametrize(("asked", "share"), [(100, None), (0.1, 0.1), (360, None), (1, None)])
def test_so_many_examples(part: str, asked: float, share: float | None) -> None:
    whole, some = load(), load(**{f"{part}subset": asked})
    other = "test_" if part == "" else ""
    y, few = getattr(whole, f"{part}y"), getattr(some, f"{part}y")
    rows = rows_of(getattr(some, f"{part}x"), getattr(whole, f"{part}x"))
    count = round(share * len(y)) if share else asked
    assert len(rows) == len(few) == count
    assert rows == sorted(set(rows))
    np.testing.assert_array_equal(few, y[rows])
    np.testing.assert_array_equal(getattr(some, f"{other}x"), getattr(whole, f"{other}x"))
    due = np.bincount(y, minlength=10) * count / len(y)
    assert (np.abs(np.bincount(few, minlength=10) - due) < 1).all()


def test_what_is_known_of_examples_goes_with_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((60, 3)).astype(np.float32), np.arange(60) % 3
    np.savez(tmp_path / "own.npz", x=x, y=y, site=x[:, 0])
    section = {"name": "npz", "path": tmp_path / "own.npz", "subset": 12}
    part = load(**section)
    np.testing.assert_array_equal(part.columns["site"], part.x[:, 0])
    stored = load(**section, in_place=True)
    assert isinstance(stored.x, StoredArray)  # still in its file
    np.testing.assert_array_equal(np.asarray(stored.x), part.x)

    of = {"name": "synthetic", "shape": [1, 6, 6], "samples": 60, "test_samples": 20}
    planted = {"name": "shortcut", "of": of}
    whole, part = load(**planted), load(**planted, test_subset=10)
    rows = rows_of(part.test_x, whole.test_x)
    for name, column in whole.test_columns.items():
        np.testing.assert_array_equal(part.test_columns[name], column[rows])
    assert part.truth
    for kind, where in whole.truth.items():
        np.testing.assert_array_equal(part.truth[kind], where[rows])


def test_a_number_is_drawn_from_all_alike() -> None:
    whole, part = (
        load(name="friedman", samples=100, test_samples=40, **s)
        for s in ({}, {"subset": 30, "test_subset": 10})
    )
    assert len(set(rows_of(part.x, whole.x))) == 30
    assert len(set(rows_of(part.test_x, whole.test_x))) == 10
    nested = {"name": "drift", "of": {"name": "digits", "subset": 50}, "round": 2}
    assert len(load(**nested).y) == 50


def test_the_same_examples_whatever_the_seed() -> None:
    one, other = (
        prepare(small_experiment(data={"subset": 300, "test_subset": 50}, seed=seed))
        for seed in (0, 1)
    )
    np.testing.assert_array_equal(one[0].x, other[0].x)
    np.testing.assert_array_equal(one[0].test_x, other[0].test_x)
    assert not np.array_equal(one[1].train.values, other[1].train.values)


def test_runs_differ_by_their_data_hash(finish: Callable[..., Run]) -> None:
    runs = [
        finish(data=data, train={"rounds": 1})
        for data in ({}, {"subset": 500}, {"subset": 500}, {"test_subset": 100})
    ]
    hashes = [run.manifest["data_hash"] for run in runs]
    assert hashes[1] == hashes[2]
    assert runs[1].result_hash == runs[2].result_hash
    assert len(set(hashes)) == 3
    assert runs[1].clients["samples"].sum() == 500
