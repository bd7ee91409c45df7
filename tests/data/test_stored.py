"""Inputs that stay in their files: what is read of them, and that runs come to the same."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
from cachetools import cached
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from experiments import Finish, small_experiment
from fedsim.data import datasets, load_dataset, stored
from fedsim.data.dataset import Dataset
from fedsim.data.sources import tables
from fedsim.data.stored import MappedArray, StoredArray, bounds, select
from fedsim.errors import DataError

rng = np.random.default_rng(0)


def pixels(count: int = 40) -> np.ndarray:
    return rng.integers(0, 256, (count, 1, 8, 8)).astype(np.uint8)


def labels(count: int = 40) -> np.ndarray:
    return np.arange(count) % 4


def npz(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def npy(folder: Path, **arrays: np.ndarray) -> Path:
    folder.mkdir()
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return folder


def painted(folder: Path) -> Path:
    """Images in folders of their classes, of two sizes."""
    for k, image in enumerate(pixels()):
        path = folder / f"class {k % 4}" / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0]).resize((8 + k % 2, 8)).save(path)
    return folder


def table(path: Path, rows: int = 40) -> Path:
    """A Parquet file of row groups of seven rows."""
    frame = pd.DataFrame(rng.random((rows, 5)), columns=list("abcde"))
    frame["n"] = np.arange(rows)
    frame["kind"] = [f"kind {k % 3}" for k in range(rows)]
    frame.to_parquet(path, row_group_size=7)
    return path


PIXELS = {"size": 8, "channels": 1}
SECTIONS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "npz": lambda p: {"name": "npz", "path": npz(p / "a.npz", x=pixels(), y=labels())},
    "npz of floats": lambda p: {
        "name": "npz",
        "path": npz(p / "a.npz", x=rng.random((40, 5)), y=labels(), site=labels() % 2),
    },
    "npz with a test set": lambda p: {
        "name": "npz",
        "path": npz(
            p / "a.npz", x_train=pixels(), y_train=labels(), x_test=pixels(8), y_test=labels(8)
        ),
    },
    "npy": lambda p: {"name": "npz", "path": npy(p / "a", x=pixels(), y=labels(), site=labels())},
    "folder": lambda p: {"name": "folder", "path": painted(p / "images"), **PIXELS},
    "table": lambda p: {"name": "table", "path": table(p / "a.parquet"), "label": "kind"},
    "table with a test set": lambda p: {
        "name": "table",
        **{"path": table(p / "a.parquet"), "test_path": table(p / "b.parquet", 9)},
        **{"label": "kind", "features": ["b", "e", "n"], "columns": ["n"]},
    },
    "regression": lambda p: {
        **{"name": "table", "path": table(p / "a.parquet"), "target": "c", "categorical": "none"}
    },
}


def both(section: dict[str, Any]) -> tuple[Dataset, Dataset]:
    """The data set in memory, and in place."""
    return (
        small_experiment(data={**section, "in_place": False}).data.load(),
        small_experiment(data={**section, "in_place": True}).data.load(),
    )


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Dataset, Dataset]]:
    """Each data set in memory, and in place."""
    return {name: both(make(tmp_path_factory.mktemp("it"))) for name, make in SECTIONS.items()}


@pytest.mark.parametrize("name", SECTIONS)
def test_in_place_it_is_the_same_data_set(
    loaded: dict[str, tuple[Dataset, Dataset]], name: str
) -> None:
    memory, in_place = loaded[name]
    for part in ("x", "test_x"):
        found, expected = getattr(in_place, part), getattr(memory, part)
        assert isinstance(found, StoredArray)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert len(found) == len(expected)
        np.testing.assert_array_equal(np.asarray(found), expected)
        np.testing.assert_array_equal(np.concatenate(list(found.chunks())), expected)
        assert found.nbytes == expected.nbytes
        assert bounds(found) == (expected.min(), expected.max())
    np.testing.assert_array_equal(in_place.y, memory.y)
    np.testing.assert_array_equal(in_place.test_y, memory.test_y)
    assert (in_place.classes, in_place.features) == (memory.classes, memory.features)
    assert in_place.columns.keys() == memory.columns.keys()
    for column, values in memory.columns.items():
        np.testing.assert_array_equal(in_place.columns[column], values)


@pytest.mark.parametrize("name", ["npz with a test set", "folder", "regression"])
def test_runs_come_to_the_same_bits(tmp_path: Path, finish: Finish, name: str) -> None:
    section = SECTIONS[name](tmp_path)
    found = [
        finish(
            data={**section, "in_place": in_place},
            partition={"kind": "iid", "clients": 3, "server_fraction": 0.2},
            train={"rounds": 2},
        )
        for in_place in (False, True)
    ]
    assert found[0].result_hash == found[1].result_hash
    same = found[0].manifest["data_hash"] == found[1].manifest["data_hash"]
    assert same == (name != "folder")  # whose files are hashed as they are


@given(st.data())
def test_any_rows(loaded: dict[str, tuple[Dataset, Dataset]], data: st.DataObject) -> None:
    memory, in_place = data.draw(st.sampled_from(list(loaded.values())))
    found, expected = in_place.x, np.asarray(memory.x)
    positions = st.lists(st.integers(0, len(expected) - 1), max_size=9)
    rows = np.array(data.draw(positions), np.int64)
    np.testing.assert_array_equal(found[rows], expected[rows])
    assert found[rows].flags.writeable
    np.testing.assert_array_equal(found[rows.tolist()], expected[rows])
    part = data.draw(st.slices(len(expected)))
    np.testing.assert_array_equal(found[part], expected[part])
    chosen = select(found, rows)
    assert isinstance(chosen, StoredArray)
    again = np.arange(len(rows))[::-1]
    np.testing.assert_array_equal(chosen[again], expected[rows][::-1])
    np.testing.assert_array_equal(np.asarray(select(chosen, again)), expected[rows][::-1])
    np.testing.assert_array_equal(found[3], expected[3])
    np.testing.assert_array_equal(found[-rows - 1], expected[-rows - 1])
    mask = np.isin(np.arange(len(expected)), rows)
    np.testing.assert_array_equal(found[mask], expected[mask])
    with pytest.raises(IndexError, match=f"there are {len(expected)} rows"):
        found[[0, len(expected)]]


def test_pickled_it_is_a_description(tmp_path: Path) -> None:
    x = rng.random((1000, 100)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    found = pickle.dumps(MappedArray(tmp_path / "x.npy"))
    assert len(found) < 1000
    np.testing.assert_array_equal(pickle.loads(found)[5:9], x[5:9])


def test_a_blank_cell_is_found_in_its_row_group(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [*range(9), np.nan], "kind": ["x", "y"] * 5})
    frame.to_parquet(tmp_path / "a.parquet", row_group_size=7)
    section = {"name": "table", "path": tmp_path / "a.parquet", "label": "kind", "in_place": True}
    with pytest.raises(
        DataError, match=r"\(row group 1\): row 3: column 'a' is empty \(1 of 3 rows"
    ):
        load_dataset(datasets.parse(section))


@pytest.mark.parametrize("name", ["npz", "folder", "table"])
def test_inputs_are_known_again(tmp_path: Path, name: str) -> None:
    memory, in_place = both(SECTIONS[name](tmp_path))
    rows = np.arange(len(memory.x))
    found = [*in_place.hashes(rows)]
    assert [*in_place.hashes(rows[::-1])] == found[::-1]
    assert len(set(found)) > len(rows) / 2
    if name != "folder":  # whose files are not decoded
        assert [*memory.hashes(rows)] == found


@pytest.mark.parametrize("name", ["npz", "folder", "table"])
def test_files_that_were_replaced_are_read_anew(tmp_path: Path, name: str) -> None:
    _, before = both(SECTIONS[name](tmp_path))
    first = before.x[:]
    for path in [*tmp_path.rglob("*.npz"), *tmp_path.rglob("*.png"), *tmp_path.rglob("*.parquet")]:
        path.unlink()
    memory, after = both(SECTIONS[name](tmp_path))
    assert not np.array_equal(after.x[:], first)
    np.testing.assert_array_equal(after.x[:], memory.x)


def test_a_row_group_larger_than_the_cache_is_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "CACHE_BYTES", 1000)
    monkeypatch.setattr(stored, "CHUNK_BYTES", 400)
    kept = cached(stored.latest())(tables._row_group.__wrapped__)
    monkeypatch.setattr(tables, "_row_group", kept)
    frame = pd.DataFrame({str(k): np.zeros(4) for k in range(40)})
    frame.to_parquet(tmp_path / "a.parquet")
    rows = tables.ParquetRows(tmp_path / "a.parquet", [*frame], np.float64)
    decoded = Mock(wraps=tables.as_entries)
    monkeypatch.setattr(tables, "as_entries", decoded)
    assert [len(part) for part in rows.chunks()] == [1] * 4
    decoded.assert_called_once()


def test_decoded_images_are_kept_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = stored._decoded.cache
    cache.clear()
    _, in_place = both({"name": "folder", "path": painted(tmp_path), **PIXELS})
    read = Mock(wraps=stored.pictures.read_picture)
    monkeypatch.setattr(stored.pictures, "read_picture", read)
    first = in_place.x[[3, 5, 3]]
    np.testing.assert_array_equal(in_place.x[[3, 5, 3]], first)
    assert read.call_count == 2
    assert cache.currsize == 2 * 64
    assert cache.maxsize == stored.CACHE_BYTES
