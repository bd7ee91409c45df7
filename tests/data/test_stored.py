"""Inputs that stay in their files: what is read of them, and that runs come to the same."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from experiments import small_experiment
from fedsim import Run
from fedsim.data import stored
from fedsim.data.dataset import Dataset
from fedsim.data.sources import arrays, tables
from fedsim.data.stored import MappedArray, StoredArray, bounds, select
from fedsim.errors import DataError

Finish = Callable[..., Run]
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
            *(p / "a.npz",),
            **{"x_train": pixels(), "y_train": labels()},
            **{"x_test": pixels(8), "y_test": labels(8)},
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


@pytest.mark.usefixtures("own_ray", "driver_here")
def test_actors_read_the_files(tmp_path: Path, finish: Finish) -> None:
    common: dict[str, Any] = {
        "data": {**SECTIONS["npz"](tmp_path), "in_place": True},
        "partition": {"kind": "iid", "clients": 4},
        "train": {"rounds": 2},
    }
    there = finish(**common, engine={"kind": "ray", "actors": 2})
    assert there.result_hash == finish(**common).result_hash


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


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            lambda p: np.savez_compressed(p, x=pixels(), y=labels()),
            "'x' is compressed and cannot be read in place; use numpy.savez, which does not "
            "compress",
        ),
        (
            lambda p: np.savez(p, x=np.asfortranarray(rng.random((4, 3))), y=labels(4)),
            "'x' is in Fortran order, which cannot be read in place",
        ),
        (
            lambda p: np.savez(p, x=labels(4), y=labels(4)),
            "'x' is int64 of shape (4,), expected numbers of shape (N, ...)",
        ),
        (
            lambda p: np.savez(p, x=np.array([["a"]]), y=labels(1)),
            "'x' is <U1 of shape (1, 1), expected numbers of shape (N, ...)",
        ),
        (lambda p: np.savez(p, x=pixels()), "has no array 'y'; known: x"),
    ],
)
def test_arrays_that_cannot_be_read_in_place(
    tmp_path: Path, write: Callable[[Path], None], message: str
) -> None:
    write(tmp_path / "a.npz")
    with pytest.raises(DataError) as told:
        arrays.Npz(path=tmp_path / "a.npz", in_place=True).load()
    assert str(told.value) == f"{tmp_path}/a.npz: {message}"


def test_what_is_not_finite_or_missing_is_found_before_anything_starts(
    tmp_path: Path, finish: Finish
) -> None:
    x = rng.random((40, 5))
    x[7, 2] = np.nan
    path = npz(tmp_path / "a.npz", x_train=x, y_train=labels(), x_test=x[:4], y_test=labels(4))
    partition = {"kind": "iid", "clients": 3}
    with pytest.raises(DataError) as told:
        finish(data={"name": "npz", "path": path, "in_place": True}, partition=partition)
    assert str(told.value) == f"{path}: 'x_train' is not finite in float32 in example 7"
    path = table(tmp_path / "a.parquet")
    frame = pd.read_parquet(path)
    frame.loc[9, "d"] = np.nan
    frame.to_parquet(path, row_group_size=7)
    section = {"name": "table", "path": path, "label": "kind", "in_place": True}
    with pytest.raises(DataError) as told:
        finish(data=section, partition=partition)
    where = f"{path} (row group 1): row 3: column 'd' is empty"
    assert str(told.value).startswith(f"{where} (1 of 7 rows have empty cells)")


NO_PARQUET = "only .parquet files can be read in place"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "a.csv"}, NO_PARQUET),
        ({"test_path": "b.csv"}, NO_PARQUET),
        ({"scale": "minmax"}, "features that are read in place cannot be scaled"),
        ({"label": "kid"}, r"a\.parquet: has no column 'kid'; did you mean 'kind'\?"),
        ({"features": ["a", "z"]}, r"a\.parquet: has no column 'z'"),
        ({"target": "n", "label": None, "features": ["a", "kind"]}, r"column 'kind' has"),
        ({"path": "words.parquet"}, "column 'b' has 'two' in row 3, expected a number"),
    ],
)
def test_tables_that_cannot_be_read_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    table(Path("a.parquet"))
    words = ["0.5", "1.5", "two", "3.5"] * 5  # numbers kept as text
    frame = pd.DataFrame({"a": range(20), "b": words, "kind": ["x", "y"] * 10})
    frame.to_parquet("words.parquet")
    section = {"path": "a.parquet", "label": "kind", **fields}
    with pytest.raises((DataError, ValidationError), match=message):
        tables.Table.model_validate({**section, "in_place": True}).load()
    if fields == {"path": "words.parquet"}:  # as in memory
        with pytest.raises(DataError, match=message):
            tables.Table.model_validate(section).load()


def test_a_row_group_larger_than_the_cache_is_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.parquet"
    count = stored.CACHE_BYTES // 8 // 40 + 1
    pd.DataFrame({str(k): np.zeros(count) for k in range(40)}).to_parquet(
        path, row_group_size=count
    )
    rows = tables.ParquetRows(path, [str(k) for k in range(40)], np.float64)
    read, decoded = tables.as_entries, []

    def counted(*arguments: Any) -> Any:
        decoded.append(1)
        return read(*arguments)

    monkeypatch.setattr(tables, "as_entries", counted)
    assert sum(len(part) for part in rows.chunks()) == count
    assert len(decoded) == 1


@pytest.mark.parametrize("same", [True, False])
def test_inputs_are_compared_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    x = rng.random((40, 5)).astype(np.float32)
    other = x.copy()
    other[23, 4] += not same
    path = npz(tmp_path / "a.npz", x=other, y=labels())
    monkeypatch.setattr(stored, "CHUNK_BYTES", 100)
    assert stored.equal(x, stored.MappedArray(path, "x")) == same
    assert not stored.equal(x[:39], stored.MappedArray(path, "x"))


def test_decoded_images_are_kept_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = stored._decoded.cache
    cache.clear()
    _, in_place = both({"name": "folder", "path": painted(tmp_path), **PIXELS})
    read: list[Path] = []
    original = stored.pictures.read_picture

    def read_picture(path: Path, *arguments: Any, **named: Any) -> Any:
        read.append(path)
        return original(path, *arguments, **named)

    monkeypatch.setattr(stored.pictures, "read_picture", read_picture)
    first = in_place.x[[3, 5, 3]]
    np.testing.assert_array_equal(in_place.x[[3, 5, 3]], first)
    assert len(read) == 2
    assert cache.currsize == 2 * 64
    assert cache.maxsize == stored.CACHE_BYTES


@pytest.mark.parametrize("name", ["npz", "folder", "table"])
def test_files_that_were_replaced_are_read_anew(tmp_path: Path, name: str) -> None:
    _, before = both(SECTIONS[name](tmp_path))
    first = before.x[:]
    for path in [*tmp_path.rglob("*.npz"), *tmp_path.rglob("*.png"), *tmp_path.rglob("*.parquet")]:
        path.unlink()
    memory, after = both(SECTIONS[name](tmp_path))
    assert not np.array_equal(after.x[:], first)
    np.testing.assert_array_equal(after.x[:], memory.x)
