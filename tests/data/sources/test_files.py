"""Readers of official formats give back what was written; refusals are in refusals.yaml."""

from __future__ import annotations

import contextlib
import json
import pickle
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedsim.data.sources import files
from fedsim.data.sources.keel import read_keel
from fedsim.errors import DataError

CIFAR100 = {"coarse_labels": 20, "fine_labels": 100}
COMPRESSIONS = ("", ".gz", ".xz")

rng = np.random.default_rng(0)
COLOUR = rng.integers(0, 256, (4, 3, 32, 32), dtype=np.uint8)
FLAT = COLOUR.reshape(4, -1)


@given(
    array=hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=6)),
    compression=st.sampled_from(COMPRESSIONS),
)
def test_idx_gives_back_what_was_written(write, array, compression):
    with tempfile.TemporaryDirectory() as folder:
        path = write.idx(Path(folder) / f"file{compression}", array)
        read = files.read_idx(path, array.ndim)
    assert read.dtype == np.uint8
    np.testing.assert_array_equal(read, array)


def test_cifar_python_as_python3_writes_it(write, tmp_path):
    batch = {"data": FLAT, "coarse_labels": [0, 19, 1, 2], "fine_labels": [99, 0, 5, 7]}
    batch["filenames"] = ["a.png", "b.png", "c.png", "d.png"]  # of no use
    x, y = files.read_cifar(write.raw(tmp_path / "train.gz", pickle.dumps(batch, 4)), CIFAR100)
    np.testing.assert_array_equal(x, COLOUR)
    assert y["fine_labels"].tolist() == [99, 0, 5, 7]


IMAGE = struct.pack(">4I", 2051, 1, 2, 2) + b"1234"
WHOLE: dict[str, tuple[Callable[[Path], object], bytes]] = {
    "idx": (lambda path: files.read_idx(path, 3), IMAGE),
    "idx.gz": (lambda path: files.read_idx(path, 3), IMAGE),
    "idx.xz": (lambda path: files.read_idx(path, 3), IMAGE),
    "pickle": (
        lambda path: files.read_cifar(path, {"labels": 10}),
        pickle.dumps({"data": FLAT[:1], "labels": [3]}, 4),
    ),
    "json": (
        lambda path: files.read_leaf(path, 1, 2),
        json.dumps({"users": ["w"], "user_data": {"w": {"x": [[0.5]], "y": [1]}}}).encode(),
    ),
}


@given(name=st.sampled_from(sorted(WHOLE)), data=st.data())
def test_damage_is_always_a_data_error(write, name, data):
    read, content = WHOLE[name]
    with tempfile.TemporaryDirectory() as folder:
        path = write.raw(Path(folder) / f"file.{name}", content)
        damaged = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            where = data.draw(st.integers(0, min(len(damaged), 400) - 1))
            damaged[where] = data.draw(st.integers(0, 255))
        path.write_bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
        with contextlib.suppress(DataError):  # damage may also go unnoticed, as in a pixel
            read(path)


def test_find_prefers_the_sub_folder_and_the_plain_file(tmp_path):
    places = ["a.xz", "a.gz", "a", "mnist/a.xz", "mnist/a.gz", "mnist/a", "MNIST/raw/a.gz"]
    for place in places:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()
        assert files.find(["a"], "mnist", tmp_path) == tmp_path / place


def test_find_takes_root_else_the_environment_else_the_cache(tmp_path, monkeypatch):
    for name in ("root", "environment", "home/.cache/fedsim"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.gz").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path / "environment"))
    assert files.find(["a"], "mnist", tmp_path / "root") == tmp_path / "root/a.gz"
    assert files.find(["a"], "mnist", None) == tmp_path / "environment/a.gz"
    monkeypatch.delenv("FEDSIM_DATA")
    assert files.find(["a"], "mnist", None) == tmp_path / "home/.cache/fedsim/a.gz"


def test_files_of_a_data_set_come_from_one_folder(tmp_path):
    (tmp_path / "mnist").mkdir()
    first, other = tmp_path / "mnist/images", tmp_path / "labels"
    first.touch()
    other.touch()
    with pytest.raises(files.MissingFileError) as caught:
        files.beside(first, "labels", "mnist")
    assert f"mnist: {tmp_path}/mnist has images but no labels (nor .gz, .xz)" in str(caught.value)
    (tmp_path / "mnist/labels.xz").touch()
    assert files.beside(first, "labels", "mnist") == tmp_path / "mnist/labels.xz"


KEEL = """@relation "two by three"
% what follows is made up

@ATTRIBUTE 'wind, speed' real [0.5, 9]
@attribute sea level Integer
@attribute 30Y-rate real[-1,1]
@attribute "the rest" real
@data
1.5, 2, -3e-1, 4

% the second
.5,\t-7,0,1e300"""


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_keel(write, tmp_path, ends, compression):
    content = KEEL.replace("\n", ends).encode("utf-8-sig")
    table = read_keel(write.raw(tmp_path / f"a.dat{compression}", content))
    assert table.features == ("wind, speed", "sea level", "30Y-rate")
    assert table.target == "the rest"
    assert (table.x.dtype, table.y.dtype) == (np.float64, np.float64)
    assert table.x.tolist() == [[1.5, 2, -0.3], [0.5, -7, 0]]
    assert table.y.tolist() == [4, 1e300]


@pytest.mark.parametrize(
    ("roles", "features", "target"),
    [
        ("@outputs sea level", ("wind, speed", "30Y-rate", "the rest"), "sea level"),
        ("@Output 'wind, speed'", ("sea level", "30Y-rate", "the rest"), "wind, speed"),
        ("@inputs 30Y-rate,sea level", ("30Y-rate", "sea level"), "the rest"),
        (
            "@inputs the rest, 'wind, speed'\n@outputs 30Y-rate ",
            ("the rest", "wind, speed"),
            "30Y-rate",
        ),
        ('@input\t"the rest"\n@output\tsea level', ("the rest",), "sea level"),
    ],
)
def test_keel_roles(write, tmp_path, roles, features, target):
    values = {"wind, speed": 1.5, "sea level": 2, "30Y-rate": -0.3, "the rest": 4}
    content = KEEL.replace("@data", f"{roles}\n@data")
    table = read_keel(write.raw(tmp_path / "a.dat", content.encode()))
    assert (table.features, table.target) == (features, target)
    assert table.x[0].tolist() == [values[name] for name in features]
    assert table.y[0] == values[target]


@given(content=st.text() | st.text("@data\n,1 {}[]'\"attributeinputsreal"))
def test_any_text_is_read_as_keel_or_refused_in_words(write, content):
    with tempfile.TemporaryDirectory() as folder:
        path = write.raw(Path(folder) / "a.dat", content.encode(errors="surrogatepass"))
        with contextlib.suppress(DataError):
            read_keel(path)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize(("columns", "shape"), [(0, (6,)), (3, (6, 3))])
def test_npy(write, tmp_path, compression, columns, shape):
    array = np.random.default_rng(0).normal(size=shape)
    path = write.npy(tmp_path / f"a.npy{compression}", np.asfortranarray(array))
    read = files.read_npy(path, columns)
    assert read.flags.c_contiguous
    np.testing.assert_array_equal(read, array)
