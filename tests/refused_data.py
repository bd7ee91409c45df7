"""Files of data that are damaged, mislabelled or missing, and what is said of them."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import pickle
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from PIL import Image
from refusals import Row

from fedsim import Dataset
from fedsim.data import datasets, load_dataset
from fedsim.data.sources import files
from fedsim.data.sources.keel import read_keel


def load(**section: Any) -> Dataset:
    return load_dataset(datasets.parse(section))


def of_file(name: str, read: Callable[[Path], object], *rows: tuple[Any, str]) -> list[Row]:
    """What is said of a file with each content, after its name."""
    return [
        Row(partial(read, Path(name)), f"{name}:{said}", files={name: content})
        for content, said in rows
    ]


def of_data(section: Mapping[str, Any], *rows: tuple[Mapping[str, Any], str]) -> list[Row]:
    """What is said of a data set where these files are."""
    return [Row(partial(load, **section), said, files=content) for content, said in rows]


# IDX

rng = np.random.default_rng(0)
IMAGES = rng.integers(0, 256, (4, 28, 28), dtype=np.uint8)
LABELS = np.array([0, 9, 3, 3], np.uint8)
MISSING = "set data.root or FEDSIM_DATA to its folder, or data.download=true"


def idx(array: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.tobytes()


def shape(*sides: int) -> bytes:
    """The header of a file with images."""
    return struct.pack(">4I", 2051, *sides)


def pair(x: NDArray[np.uint8], y: NDArray[np.uint8]) -> dict[str, bytes]:
    return {"images": idx(x), "labels": idx(y)}


def mnist(*parts: str) -> dict[str, bytes]:
    """MNIST with a label that is too large."""
    images = {f"data/mnist/{part}-images-idx3-ubyte": idx(IMAGES) for part in parts}
    labels = {f"data/mnist/{part}-labels-idx1-ubyte": idx(LABELS + 1) for part in parts}
    return images | labels


def flipped(content: bytes) -> bytes:
    """With another bit in the middle."""
    half = len(content) // 2
    return content[:half] + bytes([content[half] ^ 0x10]) + content[half + 1 :]


PACKED = {".gz": gzip.compress(idx(IMAGES)), ".xz": lzma.compress(idx(IMAGES))}
ENDS_EARLY = " cannot be read: Compressed file ended before the end-of-stream marker was reached"
IDX = [
    *of_file(
        "file",
        lambda path: files.read_idx(path, 3),
        (b"", " 0 bytes, shorter than its IDX header of 16"),
        (b"\0\0\x08", " 3 bytes, shorter than its IDX header of 16"),
        (struct.pack(">4I", 2049, 1, 0, 0), " IDX magic number 2049, expected 2051 (unsigned ..."),
        (struct.pack(">4I", 0x0D03, 1, 1, 1), " IDX magic number 3331, expected 2051 ..."),
        (shape(2, 2, 2) + b"1234567", " 23 bytes, expected 24 for shape (2, 2, 2)"),
        (shape(2, 2, 2) + b"123456789", " 25 bytes, expected 24 for shape (2, 2, 2)"),
        (shape(*[2**32 - 1] * 3), " 16 bytes, expected 79228162458924105385300197391 for ..."),
    ),
    *(
        Row(lambda: files.read_idx_images(Path("images"), Path("labels"), 10), said, files=content)
        for content, said in (
            (pair(IMAGES[:, :27], LABELS), "images: images of 27×28 pixels, expected 28×28"),
            (pair(IMAGES[:0], LABELS[:0]), "images: contains no images"),
            (pair(IMAGES, LABELS[:3]), "labels: 3 labels for the 4 images of images"),
            (pair(IMAGES, LABELS + 1), "labels: record 1 has label 10, expected 0 to 9"),
            (pair(IMAGES, IMAGES), "labels: IDX magic number 2051, expected 2049 (unsigned ..."),
            (pair(LABELS, LABELS), "images: 12 bytes, shorter than its IDX header of 16"),
        )
    ),
    Row(
        lambda: files.read_idx_images(Path("images"), Path("labels"), 26, first=1),
        "labels: record 1 has label 0, expected 1 to 26",
        files=pair(IMAGES, np.array([1, 0, 2, 3], np.uint8)),
    ),
    *(
        row
        for end, whole in PACKED.items()
        for row in of_file(
            f"file{end}",
            files.read_bytes,
            (whole[: len(whole) // 2], ENDS_EARLY),
            (whole[:-1], ENDS_EARLY),
            (b"plain text, by mistake", " cannot be read: ..."),
            (flipped(whole), " cannot be read: ..."),
        )
    ),
    Row(
        lambda: files.read_bytes(Path("d")),
        "d: cannot be read: Is a directory",
        files={"d": Path.mkdir},
    ),
    Row(
        lambda: files.read_bytes(Path("none.gz")),
        "none.gz: cannot be read: No such file or directory",
    ),
    *(
        Row("run small.yaml", said, {"data": "data: {name: mnist}"}, content)
        for content, said in (
            (
                {},
                "mnist: no file 'train-images-idx3-ubyte' (nor .gz, .xz) in any of\n"
                f"  HERE/data/MNIST/raw\n  HERE/data/mnist\n  HERE/data\n{MISSING}",
            ),
            (
                mnist("train"),
                f"mnist: ... but no t10k-images-idx3-ubyte (nor .gz, .xz)\n{MISSING}",
            ),
            (
                mnist("train", "t10k"),
                "...-labels-idx1-ubyte: record 1 has label 10, expected 0 to 9",
            ),
        )
    ),
]

# CIFAR

CIFAR10, CIFAR100 = {"labels": 10}, {"coarse_labels": 20, "fine_labels": 100}
FLAT = rng.integers(0, 256, (4, 3072), dtype=np.uint8)
BATCH = pickle.dumps({"data": FLAT, "labels": [1, 2, 3, 4]}, 4)
NO_PIXELS = "expected uint8 of shape (N, 3072)"


class Harmful:
    """Makes a folder when it is unpickled by a reader that lets it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("mark",)


CIFAR = [
    *of_file(
        "test_batch",
        lambda path: files.read_cifar(path, CIFAR10),
        ([1, 2], " a pickled list, expected a dictionary"),
        ({"labels": [1]}, " has no 'data'; known: labels"),
        ({"data": FLAT, "label": [1]}, " has no 'labels'; did you mean 'label'?"),
        ({"data": "pixels", "labels": [1]}, f" 'data' is a str, {NO_PIXELS}"),
        ({"data": FLAT[0], "labels": [1]}, f" 'data' is uint8 of shape (3072,), {NO_PIXELS}"),
        (
            {"data": FLAT[:, 1:], "labels": [1]},
            f" 'data' is uint8 of shape (4, 3071), {NO_PIXELS}",
        ),
        (
            {"data": FLAT.astype(int), "labels": [1]},
            f" 'data' is int64 of shape (4, 3072), {NO_PIXELS}",
        ),
        ({"data": FLAT, "labels": [1, 2, 3]}, " 'labels' has 3 labels for 4 examples"),
        ({"data": FLAT, "labels": [1, 2, 3, 0.5]}, " 'labels' is not a list of integers"),
        ({"data": FLAT, "labels": [1, 2, 3, 2**70]}, " cannot be read: ...too large..."),
        ({"data": FLAT, "labels": [1, 2, -3, 0]}, " record 2 has label -3, expected 0 to 9"),
        ({"data": FLAT[:0], "labels": []}, " contains no records"),
        *(
            (
                pickle.dumps({"data": FLAT, "labels": Harmful()}, protocol),
                " cannot be read: ... not allowed",
            )
            for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
        ),
        *((BATCH[:length], " cannot be read: ...") for length in (0, 7, 49, 196, len(BATCH) - 1)),
    ),
    *of_file(
        "test_batch.bin",
        lambda path: files.read_cifar(path, CIFAR10),
        (bytes(2 * 3073 - 1), " 6145 bytes, ... record size 3073"),
        (b"", " contains no records"),
        (
            b"".join(bytes([label]) + bytes(3072) for label in (0, 1, 10, 2)),
            " record 2 has label 10, expected 0 to 9",
        ),
    ),
    *of_file(
        "train.bin",
        lambda path: files.read_cifar(path, CIFAR100),
        (bytes(3073), " 3073 bytes, ... record size 3074"),
    ),
    *of_data(
        {"name": "cifar10", "root": "."},
        (
            {},
            "cifar10: no file 'data_batch_[1-5]' or 'data_batch_[1-5].bin' (nor .gz, .xz) in any "
            "of\n  HERE/cifar-10-batches-py\n  HERE/cifar-10-batches-bin\n  HERE/cifar10\n  HERE\n"
            f"{MISSING}",
        ),
        (
            {"data_batch_2.bin": bytes(3073), "data_batch_4.bin": bytes(3073)},
            f"cifar10: HERE has data_batch_2.bin but no test_batch.bin (nor .gz, .xz)\n{MISSING}",
        ),
        (  # one full batch, as of the whole set
            {f"{name}.bin": bytes(3073) for name in ("data_batch_3", "test_batch")}
            | {"data_batch_1.bin": bytes(10_000 * 3073)},
            "cifar10: HERE has data_batch_1.bin but no data_batch_2.bin, data_batch_4.bin, "
            f"data_batch_5.bin (nor .gz, .xz)\n{MISSING}",
        ),
    ),
]

# LEAF


def leaf(x: Any, y: Any) -> dict[str, Any]:
    return {"users": ["w"], "num_samples": [len(y)], "user_data": {"w": {"x": x, "y": y}}}


LEAF = [
    *of_file(
        "a.json",
        lambda path: files.read_leaf(path, 4, 62),
        (leaf([[0.0] * 3], [0]), " 'x' of user 'w' is float64 of shape (1, 3), expected ..."),
        (leaf([[0.0] * 4, [0.0]], [0, 0]), " cannot be read: ...inhomogeneous..."),
        (leaf([["0.5"] * 4], [0]), " 'x' of user 'w' is <U3 of shape (1, 4), expected ..."),
        (
            leaf([[0.0] * 4, [0, 0, 1.5, 0]], [0, 0]),
            " example 1 of user 'w' has values outside ...",
        ),
        (leaf([[float("nan")] * 4], [0]), " example 0 of user 'w' has values outside 0 to 1"),
        (leaf([[0.0] * 4], [0, 1]), " 'y' of user 'w' has 2 labels for 1 examples"),
        (leaf([[0.0] * 4], [62]), " record 0 has label 62, expected 0 to 61"),
        (leaf([[0.0] * 4], ["a"]), " 'y' of user 'w' is not a list of integers"),
        (leaf([[0.0] * 4], [True]), " 'y' of user 'w' is not a list of integers"),
        (b'{"users": [', " cannot be read: Expecting value: line 1 column 12 (char 11)"),
        (b"\xff\xfe\xfd", " cannot be read: 'utf-16-le' codec can't decode byte ..."),
        (b"[" * 100_000, " cannot be read: maximum recursion depth exceeded ..."),
        ([1], " a JSON list, expected an object"),
        ({"user": []}, " has no 'users'; did you mean 'user'?"),
        ({"users": ["w"]}, " has no 'user_data'; known: users"),
        ({"users": "w", "user_data": {"w": {}}}, " 'users' is not a list of names"),
        ({"users": ["v"], "user_data": {"w": {}}}, " 'user_data' and 'users' have different ..."),
        (
            {"users": ["w", "w"], "user_data": {"w": {}}},
            " 'user_data' and 'users' have different users",
        ),
        ({"users": ["w"], "user_data": {"w": 3}}, " the data of user 'w' are not an object ..."),
        ({"users": ["w"], "user_data": {"w": {"y": []}}}, " has no 'x'; known: y"),
        ({"users": ["w"], "user_data": {"w": {"x": []}}}, " has no 'y'; known: x"),
    ),
    *of_data(
        {"name": "femnist", "root": "."},
        ({"train/a.json": leaf([[0.0] * 784], [0])}, "femnist: no JSON file in HERE/test..."),
        (
            {"train/a.json": leaf([[0.0] * 784], [0]), "test/a.json": leaf([], [])},
            "test: its JSON files contain no examples",
        ),
    ),
    Row(
        lambda: files.find(["train/*.json"], "femnist", Path()),
        "femnist: no file 'train/*.json' (nor .gz, .xz) in any of\n  femnist\n  femnist/data\n  ."
        "\nset data.root or FEDSIM_DATA to its folder",
    ),
]

# arrays


def saved(save: Callable[..., None], *arrays: Any, **named: Any) -> bytes:
    stream = io.BytesIO()
    save(stream, *arrays, **named)
    return stream.getvalue()


X, Y = np.zeros((4, 3)), np.array([0, 0, 1, 1])
NPY, ARCHIVE = saved(np.save, X), saved(np.savez, x=X, y=Y)
AT_LEAST_TWO = "splitting off a test set needs at least 2 per class"
NPZ = of_file(
    "a.npz",
    lambda path: load(name="npz", path=str(path)),
    ({"x": X}, " has no array 'y'; known: x"),
    ({"images": X, "y": Y}, " has no array 'x'; known: images, y"),
    ({"x_train": X, "y_trian": Y}, " has no array 'y_train'; did you mean 'y_trian'?"),
    (
        {"x_train": X, "y_train": Y, "x_tests": X, "y_test": Y},
        " 'x_tests' has shape (4, 3); a column has shape (4,), as 'x_train' has 4 examples",
    ),
    ({"x_train": X, "y_train": Y, "y_test": Y}, " has no array 'x_test'; did you mean 'y_test'?"),
    ({"X": X, "Y": Y}, " has no array 'x_train'; known: X, Y"),
    ({"x": X, "y": Y[:3]}, " 'y' has 3 labels for 4 inputs in 'x'"),
    ({"x": X, "y": Y - 1}, " 'y' has the negative label -1 at 0"),
    ({"x": X, "y": Y / 2}, " 'y' is float64 of shape (4,), expected integers of shape (N,)"),
    ({"x": X, "y": Y[:, None]}, " 'y' is int64 of shape (4, 1), expected integers of shape (N,)"),
    (
        {"x": X, "y": np.array([0, 0, 2**64 - 1, 1], np.uint64)},
        " 'y' has the negative label -1 at 2",
    ),
    ({"x": X[0], "y": Y}, " 'x' is float64 of shape (3,), expected numbers of shape (N, ...)"),
    ({"x": X[:0], "y": Y[:0]}, " 'x', of shape (0, 3), is empty"),
    ({"x": X.astype(str), "y": Y}, " 'x' is <U32 of shape (4, 3), expected numbers of shape ..."),
    ({"x": X + np.nan, "y": Y}, " 'x' is not finite in float32 in example 0"),
    ({"x": X + 1e300, "y": Y}, " 'x' is not finite in float32 in example 0"),
    ({"x": X, "y": Y, "site": Y[:3]}, " 'site' has shape (3,); a column has shape (4,), as ..."),
    ({"x": X, "y": np.array([0, 0, 0, 1])}, f" class '1' has 1 example; {AT_LEAST_TWO}"),
    (
        {"x_train": X, "y_train": Y, "x_test": X[:, :2], "y_test": Y},
        " 'x_test' has float32 inputs of shape (2,), 'x_train' float32 of (3,)",
    ),
    ({"x": X.astype(object), "y": Y}, " cannot be read: Object arrays cannot be loaded when ..."),
    ({"x": X, "y": Y}, " 4 examples of 2 classes ... test_fraction=0.2..."),
    *(
        (content, " cannot be read: ...")
        for content in (b"", b"PK\x03\x04", ARCHIVE[:100], ARCHIVE[:-30], b"no archive")
    ),
)
ARRAYS = [
    *of_file(
        "a.npy",
        lambda path: files.read_npy(path, 3),
        (np.zeros((4, 2)), " is float64 of shape (4, 2), expected float64 of shape (N, 3)"),
        (np.zeros(3), " is float64 of shape (3,), expected float64 of shape (N, 3)"),
        (np.zeros((4, 3), np.float32), " is float32 of shape (4, 3), expected float64 of ..."),
        (np.zeros((4, 3), ">f8"), " is >f8 of shape (4, 3), expected float64 of shape (N, 3)"),
        (np.zeros((0, 3)), " contains no rows"),
        (np.array([[0, 0, 0], [0, np.nan, 0]]), " row 1 has values that are not finite"),
        (np.array([[0, 0, -np.inf]]), " row 0 has values that are not finite"),
        (np.array([[{}] * 3]), " cannot be read: Object arrays cannot be loaded when ..."),
        *((content, " cannot be read: ...") for content in (b"", b"no array", NPY[:20], NPY[:-1])),
    ),
    *of_file("b.npz", files.read_npy, ({"x": X}, " is a NpzFile, expected float64 of shape (N,)")),
    *of_data(
        {"name": "npz", "path": "b.npy"},
        ({"b.npy": X}, "b.npy: is not an .npz archive of named arrays"),
    ),
    *of_data(
        {"name": "npz", "path": "c.npz"}, ({}, "c.npz: cannot be read: No such file or directory")
    ),
    *(
        Row(partial(Dataset.of, **given), f"data: {said}")
        for given, said in (
            ({"x": X, "y": Y / 2}, "'y' is float64 of shape (4,), expected integers of ..."),
            ({"x": X, "y": Y[:3]}, "'y' has 3 labels for 4 inputs in 'x'"),
            ({"x": X, "y": Y, "test_x": X}, "test_x and test_y go together"),
        )
    ),
]


def medmnist(**changed: NDArray[Any]) -> dict[str, Any]:
    """The file as published, where labels are of shape (N, 1), or with other arrays."""
    arrays = {}
    for part, count in {"train": 6, "val": 2, "test": 3}.items():
        arrays[f"{part}_images"] = np.zeros((count, 28, 28), np.uint8)
        arrays[f"{part}_labels"] = (np.arange(count, dtype=np.uint8) % 2)[:, np.newaxis]
    return {"breastmnist.npz": arrays | changed}


IMAGES_OF = "expected uint8 of shape (N, height, width) or (N, height, width, 3)"
MEDMNIST = of_data(
    {"name": "medmnist", "set": "breastmnist", "root": "."},
    (
        {},
        "medmnist: no file 'breastmnist.npz' (nor .gz, .xz) in any of\n  HERE/medmnist\n  HERE\n"
        "get the file of the set from medmnist.com, and set data.root or FEDSIM_DATA to its ...",
    ),
    ({"breastmnist.npz": b"no archive"}, "breastmnist.npz: cannot be read: ..."),
    ({"breastmnist.npz": {"train_labels": [[1]]}}, "breastmnist.npz: has no 'train_images'; ..."),
    (
        medmnist(train_labels=np.full((6, 1), 2)),
        "breastmnist.npz: record 0 has label 2, expected 0 to 1",
    ),
    (
        medmnist(train_labels=np.zeros((6, 14), int)),
        "breastmnist.npz: 'train_labels' is int64 of shape (6, 14), expected integers of ...",
    ),
    (
        medmnist(test_images=np.zeros((3, 9, 9, 9), np.uint8)),
        f"breastmnist.npz: 'test_images' is uint8 of shape (3, 9, 9, 9), {IMAGES_OF}",
    ),
    (
        medmnist(train_images=np.zeros((6, 9, 9))),
        f"breastmnist.npz: 'train_images' is float64 of shape (6, 9, 9), {IMAGES_OF}",
    ),
)


def collaborators(*missing: str, **changed: NDArray[np.float64]) -> dict[str, Any]:
    """OpenFL-XAI's arrays, without some, or others."""
    found: dict[str, Any] = {}
    for k in range(5):
        for part, rows in (("train", 5), ("test", 2)):
            found[f"col{k}_X_{part}"] = np.zeros((rows, 15))
            found[f"col{k}_y_{part}"] = np.zeros(rows)
    kept = {name: array for name, array in (found | changed).items() if name not in missing}
    return {f"{name.replace('_', '/', 1)}.npy": array for name, array in kept.items()}


OPENFL_XAI = of_data(
    {"name": "openfl_xai", "root": "."},
    (
        {},
        "openfl_xai: no file 'col0/X_train.npy' ...\n...\n...\n...\n...\nget data/col0_da...",
    ),
    (
        collaborators("col3_y_test"),
        "openfl_xai: HERE has col0 but no col3/y_test.npy ...\nget data/col0_data.zip ...",
    ),
    (collaborators(col3_y_test=np.zeros(3)), "col3/y_test.npy: 3 targets for the 2 rows of ..."),
    (collaborators(col2_X_train=np.zeros((6, 16))), "col2/X_train.npy: ... (6, 16), expected ..."),
    (
        collaborators(col1_y_train=np.array([0, 1, np.nan, 0, 0])),
        "col1/y_train.npy: row 2 has values that are not finite",
    ),
)

# KEEL

HEADER = "@relation r\n@attribute wind real\n@attribute rain real [0,1]\n"
NO_TYPE = "is not a name and a type, real or integer, with or without its range [a, b]"
NOMINAL = "is nominal; a regression takes real or integer ones"


def keel_rows(count: int) -> str:
    return HEADER + "@data\n" + "\n".join(f"{k},{k / 9}" for k in range(count))


KEEL = [
    *of_file(
        "a.dat",
        read_keel,
        (HEADER + "1,2", "4: '1,2' above @data is not a keyword of KEEL; known: @attribute, ..."),
        (HEADER + "@datas\n1,2", "4: '@datas' above @data is not a ...; did you mean '@data'?"),
        (HEADER, "3: the file ends without @data"),
        ("", "1: the file ends without @data"),
        (HEADER + "@data\n% none\n\n", "4: no rows after @data"),
        ("@attribute a real\n@data\n1", "2: 1 attributes above @data, expected an input and ..."),
        ("@data\n1", "1: 0 attributes above @data, expected an input and an output"),
        (
            HEADER + "@attribute sea {calm, rough}\n@data\n1,2,calm",
            f"4: attribute 'sea' {NOMINAL}",
        ),
        (HEADER + "@attribute 'a b'{calm}", f"4: attribute 'a b' {NOMINAL}"),
        (HEADER + "@attribute sea string", f"4: '@attribute sea string' {NO_TYPE}"),
        (HEADER + "@attribute real", f"4: '@attribute real' {NO_TYPE}"),
        (HEADER + "@attribute wind integer", "4: attribute 'wind' is declared twice"),
        (
            HEADER + "@inputs windy\n@data\n1,2",
            "4: @inputs names 'windy', ...; did you mean 'wind'?",
        ),
        (
            HEADER + "@inputs wind\n@outputs snow\n@data\n1,2",
            "5: @outputs names 'snow', which is not an attribute; known: rain, wind",
        ),
        (HEADER + "@input wind, wind\n@data\n1,2", "4: @inputs names 'wind' twice"),
        (HEADER + "@inputs\n@data\n1,2", "4: @inputs names no attribute"),
        (HEADER + "@inputs rain\n@data\n1,2", "4: @inputs names 'rain', which is the output"),
        (HEADER + "@outputs wind, rain\n@data\n1,2", "4: @outputs names 2 attributes, expected 1"),
        (HEADER + "@outputs\n@data\n1,2", "4: @outputs names 0 attributes, expected 1"),
        (HEADER + "@data\n1,2\n\n3", "7: 1 values for 2 attributes"),
        (HEADER + "@data\n1,2\n3,4,5", "6: 3 values for 2 attributes"),
        (HEADER + "@data\n1,much", "5: 'rain' is 'much', expected a finite number"),
        (HEADER + "@data\n?,2", "5: no value of 'wind'"),
        (HEADER + "@data\n1,<NULL>", "5: no value of 'rain'"),
        (HEADER + "@data\n1,", "5: no value of 'rain'"),
        (HEADER + "@data\n1,NaN", "5: 'rain' is 'NaN', expected a finite number"),
        (HEADER + "@data\n-inf,1", "5: 'wind' is '-inf', expected a finite number"),
        (HEADER + "@data\n1e400,1", "5: 'wind' is '1e400', expected a finite number"),
    ),
    *(
        Row(
            partial(load, name="keel", path="a.dat", **fields),
            f"a.dat: {said}",
            files={"a.dat": keel_rows(count)},
        )
        for count, fields, said in (
            (1, {}, "1 examples cannot be split with test_fraction=0.2: ..."),
            (3, {"test_fraction": 0.9}, "3 examples cannot be split with test_fraction=0.9: ..."),
        )
    ),
    *of_data(
        {"name": "mortgage", "root": "."},
        (
            {},
            "mortgage: no file 'mortgage.dat' (nor .gz, .xz) in any of\n  HERE/mortgage\n  HERE\n"
            "get 'mortgage' from KEEL's regression data sets, and set data.root or FEDSIM_DATA to "
            "its folder",
        ),
    ),
]

# tables


def frame(column: str = "", value: Any = None, **columns: Any) -> pd.DataFrame:
    """Twenty patients, with another value in row 8 of a column, or with other columns."""
    found = pd.DataFrame(
        {
            "age": np.arange(20),
            "dose": np.arange(20) / 8,
            "sick": ["yes", "no"] * 10,
            "site": ["north"] * 5 + ["south"] * 15,
            "fit": [True, False] * 10,
        }
    ).assign(**columns)
    if column:
        values = found[column].astype(object)
        values[7] = value
        found[column] = values
    return found


def of_table(*rows: tuple[pd.DataFrame, dict[str, Any], str], **fields: Any) -> list[Row]:
    """What is said of a table, read with these fields and the row's own."""
    return [
        Row(
            partial(load, **{"name": "table", "path": "a.csv", **fields, **own}),
            f"a.csv: {said}",
            files={"a.csv": table},
        )
        for table, own, said in rows
    ]


EMPTY = "is empty (1 of 20 rows have empty cells); fill or drop them"
NO_NUMBER = "in row 8, expected a number (data.features names the columns to use)"
TABLES = [
    *of_table(
        (frame("age", None), {}, f"line 9: column 'age' {EMPTY}"),
        (frame("sick", None), {}, f"line 9: column 'sick' {EMPTY}"),
        (frame("site", None), {"columns": ["site"]}, f"line 9: column 'site' {EMPTY}"),
        (frame("age", "old"), {}, f"column 'age' has 'old' {NO_NUMBER}"),
        (frame("age", "old"), {"features": ["age"]}, f"column 'age' has 'old' {NO_NUMBER}"),
        (frame("age", 1e300), {}, "column 'age' has 1e+300 in row 8, not finite in float32"),
        (frame(), {"features": ["site"]}, "column 'site' has 'north' in row 1, expected a ..."),
        (frame(), {"features": ["dosis"]}, "has no column 'dosis'; did you mean 'dose'?"),
        (frame(), {"columns": ["sites"]}, "has no column 'sites'; did you mean 'site'?"),
        (frame(), {"label": "sic"}, "has no column 'sic'; did you mean 'sick'?"),
        (frame("sick", "perhaps"), {}, f"class 'perhaps' has 1 example; {AT_LEAST_TWO}"),
        *(
            (frame("age", digits), {}, f"column 'age' has {quote}{'9' * 59}... {NO_NUMBER}")
            for digits, quote in (("9" * 400, ""), ("9" * 5000, "'"))
        ),
        label="sick",
    ),
    *of_table(
        (frame("age", None), {}, f"line 9: column 'age' {EMPTY}"),
        (frame("age", "old"), {}, "column 'age' has 'old' in row 8, expected a number"),
        (frame("age", np.inf), {}, "column 'age' has inf in row 8, not finite in float64"),
        (frame("dose", np.inf), {}, "column 'dose' has inf in row 8, not finite in float64"),
        (frame(), {"target": "sick"}, "column 'sick' has 'yes' in row 1, expected a number"),
        (frame(), {"target": "ag"}, "has no column 'ag'; did you mean 'age'?"),
        (frame("dose", "much"), {}, f"column 'dose' has 'much' {NO_NUMBER}"),
        (frame(), {"test_fraction": 0.99}, "20 examples cannot be split with ..."),
        *(
            (
                frame("age", digits),
                {},
                f"column 'age' has {quote}{'9' * 59}... in row 8, expected a number",
            )
            for digits, quote in (("9" * 400, ""), ("9" * 5000, "'"))
        ),
        target="age",
    ),
    *of_file(
        "t.csv",
        lambda path: load(name="table", path=str(path), label="y"),
        ("", " cannot be read: No columns to parse from file"),
        ("x,y\n", " has no rows"),
        ("x,y\n1,2\n1,2,3,4\n", " cannot be read: ...Expected 2 fields in line 3, saw 4"),
        ("x,y\n1,2,3\n4,5,6\n", " cannot be read: Length of header ... does not match ..."),
        (b"x,y\n\xff\xfe,1\n", " cannot be read: ...codec can't decode..."),
        ("x,y\na,1\nb,2\n", " has no numeric columns to use as features..."),
    ),
    *of_file(
        "a.xlsx",
        lambda path: load(name="table", path=str(path), label="y"),
        (b"", " is neither .csv nor .parquet"),
    ),
    *of_file(
        "a.parquet",
        lambda path: load(name="table", path=str(path), label="sick"),
        (b"PAR1 and no more", " cannot be read: ..."),
        (frame(age=[str(k) for k in range(20)]), " column 'age' has '0' in row 1, expected a ..."),
        (
            frame(age=pd.array([*range(3), None, *range(4, 20)], "Int64")),
            " row 4: column 'age' is empty (1 of 20 rows ...",
        ),
    ),
    *of_data(
        {"name": "table", "path": "none.csv", "label": "y"},
        ({}, "none.csv: cannot be read: No such file or directory"),
    ),
    *of_data(
        {"name": "table", "path": "a.csv", "label": "sick", "test_path": "b.csv"},
        (
            {"a.csv": frame(), "b.csv": frame().drop(columns="dose")},
            "b.csv: has no column 'dose'; known: age, fit, sick, site",
        ),
        ({"a.csv": frame(), "b.csv": frame(sick=1)}, "b.csv: label column 'sick' is int64, ..."),
    ),
]

# folders of images


def picture(*colour: int, size: tuple[int, int] = (20, 10)) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, colour).save(stream, "png")
    return stream.getvalue()


PNG = picture(1, 2, 3, size=(200, 200))
FOLDERS = of_data(
    {"name": "folder", "path": "d"},
    ({}, "d: is not a folder"),
    ({"d": Path.mkdir}, "d: has no class folders"),
    ({"d/test/cat/1.png": PNG}, "d: has test/ but no train/"),
    ({"d/train/cat/1.png": PNG, "d/train/dog": Path.mkdir}, "d/train/dog: contains no images"),
    ({"d/train/cat/1.png": PNG, "d/test/cat": Path.mkdir}, "d/test: contains no images"),
    (
        {"d/train/cat/1.png": PNG, "d/train/dog/1.png": PNG, "d/test/dogs/1.png": PNG},
        "d/test/dogs: not a class of ...; did you mean 'dog'?",
    ),
    *(
        (
            {"d/train/cat/1.png": PNG, "d/train/cat/2.png": damaged},
            "d/train/cat/2.png: cannot be read: ...",
        )
        for damaged in (b"", b"no image at all", PNG[:60])
    ),
    (
        {f"d/{name}.png": PNG for name in ("a/1", "a/2", "a/3", "b/1")},
        f"d: class 'b' has 1 example; {AT_LEAST_TWO}",
    ),
)

DATA = [*IDX, *CIFAR, *LEAF, *NPZ, *ARRAYS, *MEDMNIST, *OPENFL_XAI, *KEEL, *TABLES, *FOLDERS]
