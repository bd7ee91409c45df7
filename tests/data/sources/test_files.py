from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedsim.data.sources import files
from fedsim.data.sources.keel import read_keel
from fedsim.errors import DataError

CIFAR10 = {"labels": 10}
CIFAR100 = {"coarse_labels": 20, "fine_labels": 100}
COMPRESSIONS = ("", ".gz", ".xz")

rng = np.random.default_rng(0)
IMAGES = rng.integers(0, 256, (4, 28, 28), dtype=np.uint8)
LABELS = np.array([0, 9, 3, 3], np.uint8)
COLOUR = rng.integers(0, 256, (4, 3, 32, 32), dtype=np.uint8)
FLAT = COLOUR.reshape(4, -1)


# IDX


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


def test_idx_pair(write, tmp_path):
    x, y = files.read_idx_images(
        write.idx(tmp_path / "images", IMAGES), write.idx(tmp_path / "labels", LABELS), 10
    )
    assert (x.shape, x.dtype, y.dtype) == ((4, 1, 28, 28), np.uint8, np.int64)
    np.testing.assert_array_equal(x[:, 0], IMAGES)
    np.testing.assert_array_equal(y, LABELS)


def test_idx_labels_may_start_at_one(write, tmp_path):
    images = write.idx(tmp_path / "images", IMAGES)
    labels = write.idx(tmp_path / "labels", np.array([1, 26, 2, 3], np.uint8))
    assert files.read_idx_images(images, labels, 26, first=1)[1].tolist() == [0, 25, 1, 2]
    write.idx(tmp_path / "labels", np.array([1, 0, 2, 3], np.uint8))
    with pytest.raises(DataError, match=r"labels: record 1 has label 0, expected 1 to 26"):
        files.read_idx_images(images, labels, 26, first=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"file: 0 bytes, shorter than its IDX header of 16"),
        (b"\0\0\x08", r"file: 3 bytes, shorter than its IDX header of 16"),
        (
            struct.pack(">4I", 2049, 1, 0, 0),
            r"file: IDX magic number 2049, expected 2051 \(unsigned bytes, 3 dimensions\)",
        ),
        (struct.pack(">4I", 0x0D03, 1, 1, 1), r"magic number 3331, expected 2051"),
        (struct.pack(">4I", 2051, 2, 2, 2) + b"1234567", r"23 bytes, expected 24 .*\(2, 2, 2\)"),
        (struct.pack(">4I", 2051, 2, 2, 2) + b"123456789", r"25 bytes, expected 24"),
        (struct.pack(">4I", 2051, *[2**32 - 1] * 3), r"16 bytes, expected 79228162458924105385"),
    ],
)
def test_damaged_idx(write, tmp_path, content, message):
    with pytest.raises(DataError, match=message):
        files.read_idx(write.raw(tmp_path / "file", content), 3)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (IMAGES[:, :27], LABELS, r"images: images of 27×28 pixels, expected 28×28"),
        (IMAGES[:0], LABELS[:0], r"images: contains no images"),
        (IMAGES, LABELS[:3], r"labels: 3 labels for the 4 images of images"),
        (IMAGES, LABELS + 1, r"labels: record 1 has label 10, expected 0 to 9"),
        (IMAGES, IMAGES, r"labels: IDX magic number 2051, expected 2049"),
        (LABELS, LABELS, r"images: 12 bytes, shorter than its IDX header of 16"),
    ],
)
def test_mislabelled_idx_pair(write, tmp_path, x, y, message):
    images = write.idx(tmp_path / "images", x)
    labels = write.idx(tmp_path / "labels", y)
    with pytest.raises(DataError, match=message):
        files.read_idx_images(images, labels, 10)


# compressed streams


@pytest.mark.parametrize("compression", [".gz", ".xz"])
def test_compressed_stream_cut_anywhere(write, tmp_path, compression):
    path = write.idx(tmp_path / f"file{compression}", IMAGES)
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=rf"file\{compression}: (cannot be read|0 bytes)"):
            files.read_idx(path, 3)


@pytest.mark.parametrize("compression", [".gz", ".xz"])
def test_not_the_compression_of_its_name(tmp_path, compression):
    path = tmp_path / f"file{compression}"
    path.write_bytes(b"plain text, by mistake")
    with pytest.raises(DataError, match=rf"file\{compression}: cannot be read: .+"):
        files.read_bytes(path)


def test_flipped_bit_in_a_compressed_stream(write, tmp_path):
    path = write.idx(tmp_path / "file.gz", IMAGES)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"file\.gz: cannot be read: "):
        files.read_bytes(path)


def test_path_that_is_a_folder_or_is_not_there(tmp_path):
    with pytest.raises(DataError, match=re.escape(f"{tmp_path}: cannot be read: Is a directory")):
        files.read_bytes(tmp_path)
    with pytest.raises(DataError, match=r"none\.gz: cannot be read: No such file or directory"):
        files.read_bytes(tmp_path / "none.gz")


# CIFAR


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_cifar_binary(write, tmp_path, compression):
    coarse, fine = np.array([0, 19, 1, 2]), np.array([99, 0, 5, 7])
    path = write.cifar_binary(tmp_path / f"train.bin{compression}", COLOUR, coarse, fine)
    x, y = files.read_cifar(path, CIFAR100)
    np.testing.assert_array_equal(x, COLOUR)
    np.testing.assert_array_equal(y["coarse_labels"], coarse)
    np.testing.assert_array_equal(y["fine_labels"], fine)
    path = write.cifar_binary(tmp_path / f"data_batch_1.bin{compression}", COLOUR, LABELS)
    x, y = files.read_cifar(path, CIFAR10)
    np.testing.assert_array_equal(x, COLOUR)
    np.testing.assert_array_equal(y["labels"], LABELS)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_cifar_python_as_python2_wrote_it(write, tmp_path, compression):
    batch = {
        "batch_label": "training batch 1 of 5",
        "labels": LABELS.tolist(),
        "data": FLAT,
        "filenames": ["a.png", "b.png", "c.png", "d.png"],
    }
    path = write.cifar_python(tmp_path / f"data_batch_1{compression}", batch)
    x, y = files.read_cifar(path, CIFAR10)
    assert x.flags.writeable
    np.testing.assert_array_equal(x, COLOUR)
    np.testing.assert_array_equal(y["labels"], LABELS)


def test_cifar_python_as_python3_writes_it(write, tmp_path):
    batch = {"data": FLAT, "coarse_labels": [0, 19, 1, 2], "fine_labels": [99, 0, 5, 7]}
    x, y = files.read_cifar(write.raw(tmp_path / "train", pickle.dumps(batch, 4)), CIFAR100)
    np.testing.assert_array_equal(x, COLOUR)
    assert y["fine_labels"].tolist() == [99, 0, 5, 7]


def test_cifar_binary_of_another_length(write, tmp_path):
    path = write.raw(tmp_path / "test_batch.bin", bytes(2 * 3073 - 1))
    with pytest.raises(DataError, match=r"test_batch\.bin: 6145 bytes, .* record size 3073"):
        files.read_cifar(path, CIFAR10)
    write.raw(path, bytes(3073))
    with pytest.raises(DataError, match=r"test_batch\.bin: 3073 bytes, .* record size 3074"):
        files.read_cifar(path, CIFAR100)
    write.raw(path, b"")
    with pytest.raises(DataError, match=r"test_batch\.bin: contains no records"):
        files.read_cifar(path, CIFAR10)


def test_cifar_binary_label_out_of_range(write, tmp_path):
    path = write.cifar_binary(tmp_path / "x.bin", COLOUR, np.array([0, 1, 10, 2]))
    with pytest.raises(DataError, match=r"x\.bin: record 2 has label 10, expected 0 to 9"):
        files.read_cifar(path, CIFAR10)


class Harmful:
    """Runs a command when it is unpickled by a reader that lets it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_that_runs_code_is_refused(write, tmp_path, protocol):
    mark = tmp_path / "mark"
    batch = {"data": FLAT, "labels": Harmful(mark)}
    path = write.raw(tmp_path / "test_batch", pickle.dumps(batch, protocol))
    with pytest.raises(DataError, match=r"test_batch: cannot be read: .* not allowed"):
        files.read_cifar(path, CIFAR10)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([1, 2], r"test_batch: a pickled list, expected a dictionary"),
        ({"labels": [1]}, r"test_batch: has no 'data'; known: labels"),
        ({"data": FLAT, "label": [1]}, r"has no 'labels'; did you mean 'label'\?"),
        ({"data": "pixels", "labels": [1]}, r"'data' is a str, expected uint8 .*\(N, 3072\)"),
        ({"data": FLAT[0], "labels": [1]}, r"'data' is uint8 of shape \(3072,\), expected"),
        ({"data": FLAT[:, 1:], "labels": [1]}, r"'data' is uint8 of shape \(4, 3071\)"),
        ({"data": FLAT.astype(int), "labels": [1]}, r"'data' is int64 of shape \(4, 3072\)"),
        ({"data": FLAT, "labels": [1, 2, 3]}, r"'labels' has 3 labels for 4 examples"),
        ({"data": FLAT, "labels": [1, 2, 3, 0.5]}, r"'labels' is not a list of integers"),
        ({"data": FLAT, "labels": [1, 2, 3, 2**70]}, r"test_batch: cannot be read: .*too large"),
        ({"data": FLAT, "labels": [1, 2, -3, 0]}, r"record 2 has label -3, expected 0 to 9"),
        ({"data": FLAT[:0], "labels": []}, r"test_batch: contains no records"),
    ],
)
def test_mislabelled_cifar_pickle(write, tmp_path, batch, message):
    path = write.raw(tmp_path / "test_batch", pickle.dumps(batch, 4))
    with pytest.raises(DataError, match=message):
        files.read_cifar(path, CIFAR10)


def test_cifar_pickle_cut_short(write, tmp_path):
    path = write.cifar_python(tmp_path / "test_batch", {"data": FLAT, "labels": [1, 2, 3, 4]})
    whole = path.read_bytes()
    for length in [*range(0, 200, 7), len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"test_batch: cannot be read: "):
            files.read_cifar(path, CIFAR10)


# LEAF


def leaf_user(count: int) -> tuple[list[list[float]], list[int]]:
    return [[i / 8] * 4 for i in range(count)], list(range(count))


def test_leaf(write, tmp_path):
    users = {"f0001_41": leaf_user(2), "f0002_10": ([], []), "f0003_07": leaf_user(3)}
    x, y, writers = files.read_leaf(write.leaf(tmp_path / "all.json.gz", users), 4, 62)
    assert (x.shape, x.dtype, y.dtype) == ((5, 4), np.float32, np.int64)
    np.testing.assert_array_equal(x[:, 0], [0, 1 / 8, 0, 1 / 8, 2 / 8])
    assert y.tolist() == [0, 1, 0, 1, 2]
    assert writers.tolist() == ["f0001_41"] * 2 + ["f0003_07"] * 3


@pytest.mark.parametrize(
    ("user", "message"),
    [
        (([[0.0] * 3], [0]), r"'x' of user 'w' is float64 of shape \(1, 3\), .*\(N, 4\)"),
        (([[0.0] * 4, [0.0]], [0, 0]), r"a\.json: cannot be read: .*inhomogeneous"),
        (([["0.5"] * 4], [0]), r"'x' of user 'w' is <U3 of shape \(1, 4\)"),
        (([[0.0] * 4, [0, 0, 1.5, 0]], [0, 0]), r"example 1 of user 'w' has values outside 0 to"),
        (([[float("nan")] * 4], [0]), r"example 0 of user 'w' has values outside 0 to 1"),
        (([[0.0] * 4], [0, 1]), r"'y' of user 'w' has 2 labels for 1 examples"),
        (([[0.0] * 4], [62]), r"a\.json: record 0 has label 62, expected 0 to 61"),
        (([[0.0] * 4], ["a"]), r"'y' of user 'w' is not a list of integers"),
        (([[0.0] * 4], [True]), r"'y' of user 'w' is not a list of integers"),
    ],
)
def test_mislabelled_leaf(write, tmp_path, user, message):
    with pytest.raises(DataError, match=message):
        files.read_leaf(write.leaf(tmp_path / "a.json", {"w": user}), 4, 62)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (b'{"users": [', r"a\.json: cannot be read: Expecting value: line 1 column 12"),
        (b"\xff\xfe\xfd", r"a\.json: cannot be read: "),
        (b"[" * 100_000, r"a\.json: cannot be read: "),
        ([1], r"a\.json: a JSON list, expected an object"),
        ({"user": []}, r"has no 'users'; did you mean 'user'\?"),
        ({"users": ["w"]}, r"has no 'user_data'"),
        ({"users": "w", "user_data": {"w": {}}}, r"'users' is not a list of names"),
        ({"users": ["v"], "user_data": {"w": {}}}, r"'user_data' and 'users' have different"),
        ({"users": ["w", "w"], "user_data": {"w": {}}}, r"'user_data' and 'users' have different"),
        ({"users": ["w"], "user_data": {"w": 3}}, r"the data of user 'w' are not an object"),
        ({"users": ["w"], "user_data": {"w": {"y": []}}}, r"has no 'x'"),
        ({"users": ["w"], "user_data": {"w": {"x": []}}}, r"has no 'y'"),
    ],
)
def test_damaged_leaf(write, tmp_path, document, message):
    content = document if isinstance(document, bytes) else json.dumps(document).encode()
    with pytest.raises(DataError, match=message):
        files.read_leaf(write.raw(tmp_path / "a.json", content), 4, 62)


# whatever the damage, nothing but DataError


@given(data=st.data())
def test_damage_is_always_a_data_error(write, data):
    read, name, content = data.draw(
        st.sampled_from(
            [
                (lambda path: files.read_idx(path, 3), "idx", _idx_bytes()),
                (lambda path: files.read_idx(path, 3), "idx.gz", _idx_bytes()),
                (lambda path: files.read_cifar(path, CIFAR10), "x", _pickle_bytes()),
                (lambda path: files.read_leaf(path, 1, 2), "json", _leaf_bytes()),
            ]
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        path = write.raw(Path(folder) / name, content)
        damaged = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            damaged[data.draw(st.integers(0, min(len(damaged), 400) - 1))] = data.draw(
                st.integers(0, 255)
            )
        path.write_bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
        with contextlib.suppress(DataError):  # damage may also go unnoticed, as in a pixel
            read(path)


def _idx_bytes() -> bytes:
    return struct.pack(">4I", 2051, 1, 2, 2) + b"1234"


def _pickle_bytes() -> bytes:
    return pickle.dumps({"data": FLAT[:1], "labels": [3]}, 4)


def _leaf_bytes() -> bytes:
    return json.dumps({"users": ["w"], "user_data": {"w": {"x": [[0.5]], "y": [1]}}}).encode()


# where files are looked for


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


def test_missing_file_says_which_where_and_how_to_get_it(tmp_path):
    with pytest.raises(files.MissingFileError) as caught:
        files.find(["train", "train.bin"], "cifar100", tmp_path)
    assert str(caught.value) == (
        f"cifar100: no file 'train' or 'train.bin' (nor .gz, .xz) in any of\n"
        f"  {tmp_path}/cifar-100-python\n"
        f"  {tmp_path}/cifar-100-binary\n"
        f"  {tmp_path}/cifar100\n"
        f"  {tmp_path}\n"
        f"set data.root or FEDSIM_DATA to its folder, or data.download=true"
    )
    with pytest.raises(files.MissingFileError, match=r"to its folder$"):
        files.find(["train/*.json"], "femnist", tmp_path)


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


# KEEL

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


HEADER = "@relation r\n@attribute wind real\n@attribute rain real [0,1]\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            HEADER + "1,2",
            r"4: '1,2' above @data is not a keyword of KEEL; known: @attribute, @data",
        ),
        (
            HEADER + "@datas\n1,2",
            r"4: '@datas' above @data is not a keyword .*; did you mean '@da",
        ),
        (HEADER, r"3: the file ends without @data"),
        ("", r"1: the file ends without @data"),
        (HEADER + "@data\n% none\n\n", r"4: no rows after @data"),
        ("@attribute a real\n@data\n1", r"2: 1 attributes above @data, expected an input and an"),
        ("@data\n1", r"1: 0 attributes above @data, expected an input and an output"),
        (
            HEADER + "@attribute sea {calm, rough}\n@data\n1,2,calm",
            r"4: attribute 'sea' is nominal; a regression takes real or integer ones",
        ),
        (HEADER + "@attribute 'a b'{calm}", r"4: attribute 'a b' is nominal"),
        (
            HEADER + "@attribute sea string",
            r"4: '@attribute sea string' is not a name and a type, real or integer, with or",
        ),
        (HEADER + "@attribute real", r"4: '@attribute real' is not a name and a type"),
        (HEADER + "@attribute wind integer", r"4: attribute 'wind' is declared twice"),
        (
            HEADER + "@inputs windy\n@data\n1,2",
            r"4: @inputs names 'windy', which is not an attribute; did you mean 'wind'\?",
        ),
        (
            HEADER + "@inputs wind\n@outputs snow\n@data\n1,2",
            r"5: @outputs names 'snow', which is not an attribute; known: rain, wind",
        ),
        (HEADER + "@input wind, wind\n@data\n1,2", r"4: @inputs names 'wind' twice"),
        (HEADER + "@inputs\n@data\n1,2", r"4: @inputs names no attribute"),
        (HEADER + "@inputs rain\n@data\n1,2", r"4: @inputs names 'rain', which is the output"),
        (
            HEADER + "@outputs wind, rain\n@data\n1,2",
            r"4: @outputs names 2 attributes, expected 1",
        ),
        (HEADER + "@outputs\n@data\n1,2", r"4: @outputs names 0 attributes, expected 1"),
        (HEADER + "@data\n1,2\n\n3", r"7: 1 values for 2 attributes"),
        (HEADER + "@data\n1,2\n3,4,5", r"6: 3 values for 2 attributes"),
        (HEADER + "@data\n1,much", r"5: 'rain' is 'much', expected a finite number"),
        (HEADER + "@data\n?,2", r"5: no value of 'wind'"),
        (HEADER + "@data\n1,<NULL>", r"5: no value of 'rain'"),
        (HEADER + "@data\n1,", r"5: no value of 'rain'"),
        (HEADER + "@data\n1,NaN", r"5: 'rain' is 'NaN', expected a finite number"),
        (HEADER + "@data\n-inf,1", r"5: 'wind' is '-inf', expected a finite number"),
        (HEADER + "@data\n1e400,1", r"5: 'wind' is '1e400', expected a finite number"),
    ],
)
def test_damaged_keel(write, tmp_path, content, message):
    path = write.raw(tmp_path / "a.dat", content.encode())
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}:{message}"):
        read_keel(path)


@given(content=st.text() | st.text("@data\n,1 {}[]'\"attributeinputsreal"))
def test_any_text_is_read_as_keel_or_refused_in_words(write, content):
    with tempfile.TemporaryDirectory() as folder:
        path = write.raw(Path(folder) / "a.dat", content.encode(errors="surrogatepass"))
        with contextlib.suppress(DataError):
            read_keel(path)


# NumPy


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize(("columns", "shape"), [(0, (6,)), (3, (6, 3))])
def test_npy(write, tmp_path, compression, columns, shape):
    array = np.random.default_rng(0).normal(size=shape)
    path = write.npy(tmp_path / f"a.npy{compression}", np.asfortranarray(array))
    read = files.read_npy(path, columns)
    assert read.flags.c_contiguous
    np.testing.assert_array_equal(read, array)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 2)), r"is float64 of shape \(4, 2\), expected float64 of shape \(N, 3\)"),
        (np.zeros(3), r"is float64 of shape \(3,\), expected float64 of shape \(N, 3\)"),
        (np.zeros((4, 3), np.float32), r"is float32 of shape \(4, 3\), expected float64 of shape"),
        (np.zeros((4, 3), ">f8"), r"is >f8 of shape \(4, 3\), expected float64 of shape"),
        (np.zeros((0, 3)), r"contains no rows"),
        (np.array([[0, 0, 0], [0, np.nan, 0]]), r"row 1 has values that are not finite"),
        (np.array([[0, 0, -np.inf]]), r"row 0 has values that are not finite"),
        (np.array([[{}] * 3]), r"cannot be read: Object arrays cannot be loaded"),
    ],
)
def test_wrong_npy(write, tmp_path, array, message):
    path = write.npy(tmp_path / "a.npy", array)
    with pytest.raises(DataError, match=rf"a\.npy: {message}"):
        files.read_npy(path, 3)


def test_damaged_npy(write, tmp_path):
    path = write.npy(tmp_path / "a.npy", np.zeros(4))
    whole = path.read_bytes()
    for content in (b"", b"no array", whole[:20], whole[:-1]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.npy: cannot be read: .+"):
            files.read_npy(path)
    np.savez(tmp_path / "b.npz", np.zeros(4))
    with pytest.raises(DataError, match=r"b\.npz: is a NpzFile, expected float64 of shape \(N,\)"):
        files.read_npy(tmp_path / "b.npz")


# where files are looked for


def test_what_nothing_fetches_says_where_it_is_published(tmp_path):
    with pytest.raises(files.MissingFileError) as caught:
        files.find(["mortgage.dat"], "mortgage", tmp_path)
    assert str(caught.value) == (
        f"mortgage: no file 'mortgage.dat' (nor .gz, .xz) in any of\n"
        f"  {tmp_path}/mortgage\n  {tmp_path}\n"
        f"get 'mortgage' from KEEL's regression data sets, and set data.root or FEDSIM_DATA to "
        f"its folder"
    )
