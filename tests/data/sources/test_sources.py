from __future__ import annotations

import importlib
import io
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

from fedsim.config.registry import first_line
from fedsim.data import Dataset, datasets, load_dataset, partitions
from fedsim.data.sources import files
from fedsim.data.sources.arrays import Npz
from fedsim.data.sources.generated import Digits, Synthetic
from fedsim.data.sources.images import (
    CIFAR10,
    Cifar10,
    Cifar100,
    Emnist,
    FashionMnist,
    Femnist,
    Folder,
    MedMnist,
    Mnist,
)
from fedsim.data.sources.keel import Keel, Mortgage
from fedsim.data.sources.tables import OpenflXai, Table
from fedsim.errors import DataError

rng = np.random.default_rng(1)


def images(count: int, *shape: int) -> np.ndarray:
    return rng.integers(0, 256, (count, *shape), dtype=np.uint8)


def assert_sound(data: Dataset) -> None:
    for x, y in ((data.x, data.y), (data.test_x, data.test_y)):
        assert len(x) == len(y) > 0
        assert x.dtype in (np.uint8, np.float32, np.float64)
        assert x.dtype == data.x.dtype
        assert x.shape[1:] == data.shape
        assert x.flags.writeable
        if not data.classes:
            assert (x.dtype, y.dtype) == (np.float64, np.float64)
            continue
        assert y.dtype == np.int64
        assert 0 <= y.min() <= y.max() < len(data.classes)
    assert not data.features or data.shape == (len(data.features),)
    assert len(data.mean) == len(data.std)
    assert all(len(values) == len(data.x) for values in data.columns.values())


# what fedsim shows of them


def test_names_and_first_lines():
    known = dict(datasets.items())
    images = "digits mnist fashion_mnist emnist cifar10 cifar100 femnist medmnist folder"
    for name in f"{images} npz table synthetic keel mortgage openfl_xai".split():
        assert len(first_line(known[name])) > 20


def test_import_stays_light():
    heavy = "torchvision", "sklearn", "PIL"
    module = "fedsim.data.sources.images"
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "[]"


# no files needed


def test_digits():
    data = Digits().load()
    assert_sound(data)
    assert (data.x.shape, data.test_x.shape) == ((1437, 1, 8, 8), (360, 1, 8, 8))
    assert data.x.dtype == np.float32
    assert set(np.unique(data.x * 16)) == set(range(17))
    counts = np.bincount(data.y) + np.bincount(data.test_y)
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert np.abs(np.bincount(data.test_y) - counts / 5).max() < 1
    np.testing.assert_array_equal(data.test_x, Digits().load().test_x)


def test_digits_test_fraction():
    assert len(Digits(test_fraction=0.5).load().test_y) == 899
    with pytest.raises(ValidationError, match="less than 1"):
        Digits(test_fraction=1)


def test_synthetic():
    source = Synthetic(samples=5000, test_samples=503, shape=(2, 3), classes=7, noise=0.5)
    data = source.load()
    assert_sound(data)
    assert (data.x.shape, data.test_x.shape) == ((5000, 2, 3), (503, 2, 3))
    counts = np.bincount(data.test_y)
    assert counts.max() - counts.min() <= 1
    for label in range(7):  # both sets are drawn around the same centres
        ours, theirs = data.x[data.y == label], data.test_x[data.test_y == label]
        np.testing.assert_allclose(ours.mean(axis=0), theirs.mean(axis=0), atol=0.35)
        np.testing.assert_allclose(ours.std(axis=0), 0.5, atol=0.06)
    again = source.load()
    np.testing.assert_array_equal(data.x, again.x)
    np.testing.assert_array_equal(data.y, again.y)
    other = Synthetic(samples=5000, shape=(2, 3), classes=7, seed=1).load()
    assert not np.array_equal(data.y, other.y)


def test_friedman_is_its_formula() -> None:
    data = datasets.parse({"name": "friedman", "samples": 500, "features": 7, "noise": 0}).load()
    assert data.x.shape == (500, 7)
    assert data.x.dtype == data.y.dtype == np.float64
    assert data.classes == ()
    for row, y in zip(data.x, data.y, strict=True):
        value = 10 * math.sin(math.pi * row[0] * row[1]) + 20 * (row[2] - 0.5) ** 2
        assert y == pytest.approx((value + 10 * row[3] + 5 * row[4]) / 30)
    assert ((data.y >= 0) & (data.y <= 1)).all()
    assert len(np.unique(np.concatenate([data.x, data.test_x]))) == 700 * 7
    noisy = datasets.parse({"name": "friedman", "samples": 500, "features": 7, "noise": 3}).load()
    np.testing.assert_array_equal(noisy.x, data.x)
    assert np.std(noisy.y - data.y) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize(
    "wrong", [{"samples": 0}, {"shape": ()}, {"shape": (4, 0)}, {"classes": 1}, {"noise": -0.1}]
)
def test_synthetic_refuses(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        Synthetic(**wrong)


# real files


@pytest.mark.parametrize(
    ("name", "source", "train", "test", "mean", "std"),
    [
        (
            "MNIST",
            Mnist,
            [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
            [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
            0.1307,
            0.3081,
        ),
        ("Fashion-MNIST", FashionMnist, [6000] * 10, [1000] * 10, 0.2860, 0.3530),
    ],
)
def test_real_idx(real_data, name, source, train, test, mean, std):
    data = source(root=real_data(name)).load()
    assert_sound(data)
    assert data.shape == (1, 28, 28)
    assert np.bincount(data.y).tolist() == train
    assert np.bincount(data.test_y).tolist() == test
    assert (data.mean, data.std) == ((mean,), (std,))
    assert data.x.mean() / 255 == pytest.approx(mean, abs=1e-4)
    assert data.x.std() / 255 == pytest.approx(std, abs=1e-4)


def test_real_cifar10_subset(real_data, monkeypatch):
    monkeypatch.setenv("FEDSIM_DATA", str(real_data("CIFAR-10")))
    data = Cifar10().load()
    assert_sound(data)
    assert data.shape == (3, 32, 32)
    assert np.bincount(data.y).tolist() == [400] * 10
    assert np.bincount(data.test_y).tolist() == [100] * 10
    # close to the constants of the full set, which holds ten times as many images
    np.testing.assert_allclose(data.x.mean(axis=(0, 2, 3)) / 255, data.mean, atol=0.01)
    np.testing.assert_allclose(data.x.std(axis=(0, 2, 3)) / 255, data.std, atol=0.01)


def test_class_names_are_those_of_the_official_list(real_data):
    listed = (real_data("CIFAR-10") / "cifar10/batches.meta.txt").read_text().split()
    assert list(CIFAR10) == listed


def test_real_mortgage(real_data):
    data = Mortgage(root=real_data("Mortgage")).load()
    assert_sound(data)
    assert (data.x.shape, data.test_x.shape) == ((839, 15), (210, 15))
    assert (data.features[0], data.target) == ("1MonthCDRate", "30Y-CMortgageRate")
    assert (data.x.min(axis=0) == 0).all()
    assert (data.x.max(axis=0) == 1).all()
    assert (data.y.min(), data.y.max()) == (0, 1)
    # It is all but linear.
    design, test_design = (np.c_[x, np.ones(len(x))] for x in (data.x, data.test_x))
    weights, *_ = np.linalg.lstsq(design, data.y, rcond=None)
    residual = data.test_y - test_design @ weights
    assert 1 - residual.var() / data.test_y.var() == pytest.approx(0.998, abs=0.002)


def test_real_openfl_xai(real_data):
    data = OpenflXai(root=real_data("OpenFL-XAI")).load()
    assert_sound(data)
    assert (data.x.shape, data.test_x.shape) == ((11619, 15), (2417, 15))
    assert (data.features, data.target) == ((), "")
    held = np.unique(data.columns["collaborator"], return_counts=True)
    assert dict(zip(*held, strict=True)) == {
        "col0": 2222,
        "col1": 2299,
        "col2": 2362,
        "col3": 2337,
        "col4": 2399,
    }
    assert 0 == data.x.min() < data.x.max() == 1
    folder = real_data("OpenFL-XAI") / "openfl_xai/data/col1"
    ours = data.columns["collaborator"] == "col1"
    np.testing.assert_array_equal(data.x[ours], np.load(folder / "X_train.npy"))
    np.testing.assert_array_equal(data.y[ours], np.load(folder / "y_train.npy"))


# IDX files


def test_mnist_files(write, tmp_path):
    x, test_x = images(12, 28, 28), images(5, 28, 28)
    write.idx_pair(tmp_path / "MNIST/raw", "train", x, np.arange(12) % 10)
    write.idx_pair(tmp_path / "MNIST/raw", "t10k", test_x, np.arange(5))
    data = Mnist(root=tmp_path).load()
    assert_sound(data)
    np.testing.assert_array_equal(data.x[:, 0], x)
    np.testing.assert_array_equal(data.test_x[:, 0], test_x)


def test_mnist_without_its_test_files(write, tmp_path):
    write.idx_pair(tmp_path, "train", images(2, 28, 28), np.arange(2))
    with pytest.raises(DataError) as caught:
        Mnist(root=tmp_path).load()
    assert str(caught.value) == (
        f"mnist: {tmp_path} has train-images-idx3-ubyte.gz but no t10k-images-idx3-ubyte "
        f"(nor .gz, .xz)\n"
        f"set data.root or FEDSIM_DATA to its folder, or data.download=true"
    )


@pytest.mark.parametrize(
    ("split", "lowest", "classes", "names"),
    [
        ("byclass", 0, 62, {0: "0", 10: "A", 36: "a", 61: "z"}),
        ("bymerge", 0, 47, {35: "Z", 36: "a", 37: "b", 38: "d", 46: "t"}),
        ("balanced", 0, 47, {38: "d", 42: "h", 43: "n", 44: "q", 45: "r"}),
        ("letters", 1, 26, {0: "A", 25: "Z"}),
        ("digits", 0, 10, {9: "9"}),
        ("mnist", 0, 10, {9: "9"}),
    ],
)
def test_emnist_files(write, tmp_path, split, lowest, classes, names):
    x, y = images(classes, 28, 28), np.arange(classes)
    for part in ("train", "test"):
        stem = f"emnist-{split}-{part}"
        write.idx_pair(tmp_path / "gzip", stem, x.swapaxes(1, 2), y + lowest)
    data = Emnist(root=tmp_path, split=split).load()
    assert_sound(data)
    np.testing.assert_array_equal(data.x[:, 0], x)
    np.testing.assert_array_equal(data.test_x[:, 0], x)
    np.testing.assert_array_equal(data.y, y)
    assert len(data.classes) == classes
    assert {index: data.classes[index] for index in names} == names


# CIFAR files


def test_cifar10_of_five_python_batches(write, tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    x, y = images(10, 3, 32, 32), np.arange(10)
    for i in range(5):
        part = slice(2 * i, 2 * i + 2)
        batch = {"data": x[part].reshape(2, -1), "labels": y[part].tolist()}
        write.cifar_python(folder / f"data_batch_{i + 1}", batch)
    write.cifar_python(folder / "test_batch", {"data": x[:1].reshape(1, -1), "labels": [7]})
    data = Cifar10(root=tmp_path).load()
    assert_sound(data)
    np.testing.assert_array_equal(data.x, x)
    np.testing.assert_array_equal(data.y, y)
    assert data.test_y.tolist() == [7]
    assert data.std == (0.2470, 0.2435, 0.2616)


def test_cifar10_of_a_few_binary_batches(write, tmp_path):
    x = images(3, 3, 32, 32)
    write.cifar_binary(tmp_path / "data_batch_2.bin", x[:1], np.array([4]))
    write.cifar_binary(tmp_path / "data_batch_4.bin.gz", x[1:], np.array([5, 6]))
    with pytest.raises(DataError, match=r"has data_batch_2\.bin but no test_batch\.bin"):
        Cifar10(root=tmp_path).load()
    write.cifar_binary(tmp_path / "test_batch.bin.xz", x, np.array([1, 2, 3]))
    data = Cifar10(root=tmp_path).load()
    np.testing.assert_array_equal(data.x, x)
    assert data.y.tolist() == [4, 5, 6]


def test_cifar10_with_a_full_batch_must_have_all(write, tmp_path):
    write.raw(tmp_path / "data_batch_1.bin", bytes(10_000 * 3073))
    write.raw(tmp_path / "data_batch_3.bin", bytes(3073))
    write.raw(tmp_path / "test_batch.bin", bytes(3073))
    missing = r"has data_batch_1\.bin but no data_batch_2\.bin, data_batch_4\.bin, data_batch_5\."
    with pytest.raises(files.MissingFileError, match=missing):
        Cifar10(root=tmp_path).load()


def test_cifar10_missing(tmp_path):
    with pytest.raises(DataError, match=r"cifar10: no file 'data_batch_\[1-5\]' or .*\n.*-py"):
        Cifar10(root=tmp_path).load()


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("labels", ["fine", "coarse"])
def test_cifar100(write, tmp_path, binary, labels):
    x, coarse, fine = images(3, 3, 32, 32), np.array([0, 19, 4]), np.array([99, 0, 57])
    for part in ("train", "test"):
        if binary:
            path = tmp_path / f"cifar-100-binary/{part}.bin"
            write.cifar_binary(path, x, coarse, fine)
        else:
            batch = {"coarse_labels": coarse.tolist(), "fine_labels": fine.tolist()}
            path = tmp_path / f"cifar-100-python/{part}"
            write.cifar_python(path, {**batch, "data": x.reshape(3, -1)})
    data = Cifar100(root=tmp_path, labels=labels).load()
    assert_sound(data)
    np.testing.assert_array_equal(data.x, x)
    trained, other = (fine, coarse) if labels == "fine" else (coarse, fine)
    np.testing.assert_array_equal(data.y, trained)
    np.testing.assert_array_equal(data.test_y, trained)
    assert len(data.classes) == (100 if labels == "fine" else 20)
    assert len(set(data.classes)) == len(data.classes)
    ((name, values),) = data.columns.items()
    assert name == ("coarse" if labels == "fine" else "fine")
    np.testing.assert_array_equal(values, other)


# LEAF files


def leaf_user(first: int, count: int) -> tuple[list[list[float]], list[int]]:
    return [[(first + i) / 64] * 784 for i in range(count)], list(range(first, first + count))


def test_femnist(write, tmp_path):
    folder = tmp_path / "femnist/data"
    write.leaf(
        folder / "train/all_data_0.json", {"f0_1": leaf_user(0, 2), "f1_2": leaf_user(2, 3)}
    )
    write.leaf(folder / "train/all_data_1.json", {"f2_3": leaf_user(60, 2)})
    write.leaf(folder / "test/all_data_0.json.gz", {"f0_1": leaf_user(5, 1)})
    data = Femnist(root=tmp_path).load()
    assert_sound(data)
    assert data.x.shape == (7, 1, 28, 28)
    assert data.y.tolist() == [0, 1, 2, 3, 4, 60, 61]
    assert data.columns["writer"].tolist() == ["f0_1"] * 2 + ["f1_2"] * 3 + ["f2_3"] * 2
    np.testing.assert_allclose(data.x[:, 0, 14, 14], data.y / 64)
    assert (data.classes[0], data.classes[10], data.classes[61]) == ("0", "A", "z")


def test_femnist_without_test_set_or_examples(write, tmp_path):
    write.leaf(tmp_path / "train/a.json", {"w": leaf_user(0, 1)})
    with pytest.raises(DataError, match=rf"femnist: no JSON file in {tmp_path}/test"):
        Femnist(root=tmp_path).load()
    write.leaf(tmp_path / "test/a.json", {"w": ([], [])})
    with pytest.raises(DataError, match=rf"{tmp_path}/test: its JSON files contain no examples"):
        Femnist(root=tmp_path).load()


# MedMNIST


def medmnist(write, path: Path, shape: tuple[int, ...] = (28, 28), **changed: np.ndarray) -> None:
    """A file as published: labels are of shape (N, 1)."""
    arrays = {}
    for part, count in {"train": 6, "val": 2, "test": 3}.items():
        arrays[f"{part}_images"] = images(count, *shape)
        arrays[f"{part}_labels"] = (np.arange(count, dtype=np.uint8) % 2)[:, np.newaxis]
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays | changed)
    write.raw(path, stream.getvalue())


@pytest.mark.parametrize("folder", ["", "medmnist"])
def test_medmnist_in_grey(write, tmp_path, folder):
    pixels = images(6, 28, 28)
    medmnist(write, tmp_path / folder / "breastmnist.npz", train_images=pixels)
    data = MedMnist(root=tmp_path, set="breastmnist").load()
    assert_sound(data)
    np.testing.assert_array_equal(data.x[:, 0], pixels)
    assert (data.y.tolist(), data.test_y.tolist()) == ([0, 1, 0, 1, 0, 1], [0, 1, 0])
    assert data.classes == ("malignant", "normal, benign")
    assert data.mean == data.std == (0.5,)


def test_medmnist_in_colour(write, tmp_path):
    pixels = images(3, 28, 28, 3)
    medmnist(write, tmp_path / "pathmnist.npz", (28, 28, 3), test_images=pixels)
    data = MedMnist(root=tmp_path, set="pathmnist").load()
    assert_sound(data)
    assert data.shape == (3, 28, 28)
    np.testing.assert_array_equal(data.test_x[:, 1], pixels[..., 1])
    assert (len(data.classes), data.classes[5]) == (9, "smooth muscle")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"train_labels": np.full((6, 1), 2)}, "record 0 has label 2, expected 0 to 1"),
        ({"train_labels": np.zeros((6, 14), int)}, r"int64 of shape \(6, 14\), expected integers"),
        ({"test_images": np.zeros((3, 9, 9, 9), np.uint8)}, r"'test_images' is uint8 of shape"),
        ({"train_images": np.zeros((6, 9, 9))}, r"float64 of shape \(6, 9, 9\), expected uint8"),
    ],
    ids=["label", "several labels", "3D", "floats"],
)
def test_medmnist_errors(write, tmp_path, changed, message):
    medmnist(write, tmp_path / "breastmnist.npz", **changed)
    with pytest.raises(DataError, match=rf"^{tmp_path}/breastmnist.npz: .*{message}"):
        MedMnist(root=tmp_path, set="breastmnist").load()


def test_medmnist_without_its_file_or_arrays(write, tmp_path):
    source = MedMnist(root=tmp_path, set="octmnist")
    with pytest.raises(DataError, match=r"no file 'octmnist\.npz'(.|\n)*from medmnist\.com"):
        source.load()
    write.raw(tmp_path / "octmnist.npz", b"no archive")
    with pytest.raises(DataError, match=r"octmnist\.npz: cannot be read"):
        source.load()
    np.savez(tmp_path / "octmnist.npz", train_labels=[[1]])
    with pytest.raises(DataError, match=r"octmnist\.npz: has no 'train_images'"):
        source.load()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chestmnist", "chestmnist has several labels for each image; fedsim takes one"),
        ("organmnist3d", "is no set of MedMNIST with 2D images; did you mean 'organsmnist'"),
    ],
)
def test_medmnist_sets_that_are_refused(name, message):
    with pytest.raises(ValidationError, match=message):
        MedMnist(set=name)


# KEEL files


def numbers(count: int) -> dict[str, list[float]]:
    return {
        "row": [float(i) for i in range(count)],
        "same": [7.5] * count,
        "rate": [2.0 * i - 5 for i in range(count)],
    }


def test_keel(write, tmp_path):
    data = Keel(path=write.keel(tmp_path / "a.dat", numbers(50))).load()
    assert_sound(data)
    assert (data.x.shape, data.test_x.shape) == ((40, 2), (10, 2))
    assert (data.classes, data.features, data.target) == ((), ("row", "same"), "rate")
    for x, y in ((data.x, data.y), (data.test_x, data.test_y)):
        np.testing.assert_array_equal(y, 2 * x[:, 0] - 5)
        assert (x[:, 1] == 7.5).all()
    rows = np.concatenate([data.x, data.test_x])[:, 0]
    assert sorted(rows) == list(range(50))
    again = Keel(path=tmp_path / "a.dat").load()
    np.testing.assert_array_equal(data.test_x, again.test_x)


def test_keel_that_is_scaled(write, tmp_path):
    path = write.keel(tmp_path / "a.dat", numbers(50))
    plain = Keel(path=path, test_fraction=0.9).load()
    data = Keel(path=path, test_fraction=0.9, scale="minmax").load()
    assert_sound(data)
    low, high = plain.x[:, 0].min(), plain.x[:, 0].max()
    assert (low, high) != (0, 49)  # so that a test row falls outside
    for x, y, rows in (
        (data.x, data.y, plain.x[:, 0]),
        (data.test_x, data.test_y, plain.test_x[:, 0]),
    ):
        np.testing.assert_allclose(x[:, 0], (rows - low) / (high - low), rtol=1e-15)
        np.testing.assert_allclose(y, x[:, 0], rtol=1e-14)
        assert (x[:, 1] == 0).all()
    assert (data.x[:, 0].min(), data.x[:, 0].max(), data.y.min(), data.y.max()) == (0, 1, 0, 1)
    assert data.test_x[:, 0].min() < 0 or data.test_x[:, 0].max() > 1


def test_keel_with_too_few_rows_to_split(write, tmp_path):
    path = write.keel(tmp_path / "a.dat", numbers(1))
    with pytest.raises(DataError, match=r"a\.dat: 1 examples cannot be split with test_f.*=0\.2"):
        Keel(path=path).load()
    path = write.keel(path, numbers(3))
    with pytest.raises(DataError, match=r"a\.dat: 3 examples cannot be split with test_f.*=0\.9"):
        Keel(path=path, test_fraction=0.9).load()


def test_mortgage_is_scaled(write, tmp_path, monkeypatch):
    write.keel(tmp_path / "mortgage/mortgage.dat.gz", numbers(20))
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path))
    data = Mortgage(test_fraction=0.1).load()
    assert_sound(data)
    assert (len(data.x), len(data.test_x)) == (18, 2)
    assert (data.x.min(), data.x.max(), data.y.min(), data.y.max()) == (0, 1, 0, 1)


def test_mortgage_missing(tmp_path):
    with pytest.raises(DataError, match=r"get 'mortgage' from KEEL's regression data sets, and"):
        Mortgage(root=tmp_path).load()


# OpenFL-XAI's arrays


def collaborate(write, folder: Path) -> None:
    for k in range(5):
        for part, rows in (("train", 4 + k), ("test", 2)):
            y = 10 * k + np.arange(rows) / 10
            x = np.asfortranarray(np.repeat(y[:, None], 15, axis=1))
            write.npy(folder / f"col{k}/X_{part}.npy", x)
            write.npy(folder / f"col{k}/y_{part}.npy", y)


@pytest.mark.parametrize("folder", ["openfl_xai/data", "openfl_xai", "data", ""])
def test_openfl_xai(write, tmp_path, folder):
    collaborate(write, tmp_path / folder)
    data = OpenflXai(root=tmp_path).load()
    assert_sound(data)
    assert (data.x.shape, data.test_x.shape) == ((30, 15), (10, 15))
    for x, y in ((data.x, data.y), (data.test_x, data.test_y)):
        assert y.tolist() == sorted(y)
        np.testing.assert_array_equal(x, np.repeat(y[:, None], 15, axis=1))
    holders = [f"col{int(y // 10)}" for y in data.y]
    assert data.columns["collaborator"].tolist() == holders


def test_openfl_xai_errors(write, tmp_path):
    def load() -> Dataset:
        return OpenflXai(root=tmp_path).load()

    with pytest.raises(DataError, match=r"no file 'col0/X_train\.npy' (.|\n)*\nget data/col0_"):
        load()
    collaborate(write, tmp_path)
    path = tmp_path / "col3/y_test.npy"
    write.npy(path, np.zeros(3))
    with pytest.raises(DataError, match=r"col3/y_test\.npy: 3 targets for the 2 rows of X_test\."):
        load()
    path.unlink()
    with pytest.raises(DataError, match=rf"{tmp_path} has col0 but no col3/y_test\.npy .*\nget "):
        load()
    write.npy(tmp_path / "col2/X_train.npy", np.zeros((6, 16)))
    with pytest.raises(DataError, match=r"col2/X_train\.npy: is float64 of shape \(6, 16\), exp"):
        load()
    write.npy(tmp_path / "col1/y_train.npy", np.array([0, 1, np.nan, 0, 0]))
    with pytest.raises(DataError, match=r"col1/y_train\.npy: row 2 has values that are not fini"):
        load()


# downloads


def offer(monkeypatch, **fetchers) -> None:
    """Let torchvision.datasets be what a test says: the tests touch no network."""
    module = SimpleNamespace(**fetchers)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", module)


def test_download(write, tmp_path, monkeypatch):
    asked = []

    def fetch(root: Path, download: bool, split: str) -> None:
        asked.append((root, download, split))
        for part in ("train", "test"):
            stem = f"emnist-digits-{part}"
            write.idx_pair(root / "EMNIST/raw", stem, images(2, 28, 28), np.arange(2))

    offer(monkeypatch, EMNIST=fetch)
    write.idx_pair(tmp_path, "emnist-digits-train", images(1, 28, 28), np.arange(1))  # no test
    source = Emnist(root=tmp_path, split="digits", download=True)
    assert len(source.load().x) == 2
    assert len(source.load().x) == 2
    assert asked == [(tmp_path, True, "digits")]


def test_download_goes_to_the_environment_s_folder(write, tmp_path, monkeypatch):
    def fetch(root: Path, download: bool) -> None:
        for stem in ("train", "t10k"):
            write.idx_pair(root / "MNIST/raw", stem, images(2, 28, 28), np.arange(2))

    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path))
    offer(monkeypatch, MNIST=fetch)
    Mnist(download=True).load()
    assert (tmp_path / "MNIST/raw/train-images-idx3-ubyte.gz").is_file()


def test_download_only_when_asked_and_only_what_is_missing(write, tmp_path, monkeypatch):
    offer(monkeypatch)
    with pytest.raises(files.MissingFileError):
        Mnist(root=tmp_path).load()
    for stem in ("train", "t10k"):
        write.idx_pair(tmp_path, stem, images(2, 28, 28), np.array([0, 10]))
    with pytest.raises(DataError, match="label 10"):  # damaged is not missing
        Mnist(root=tmp_path, download=True).load()


@pytest.mark.parametrize("error", [OSError("no route to host"), RuntimeError("no route to host")])
def test_download_that_fails(tmp_path, monkeypatch, error):
    def fetch(**arguments: object) -> None:
        raise error

    offer(monkeypatch, CIFAR10=fetch)
    message = rf"cifar10: the download into {tmp_path} failed: no route to host"
    with pytest.raises(DataError, match=message):
        Cifar10(root=tmp_path, download=True).load()


@pytest.mark.parametrize(
    ("source", "folder", "stems"),
    [
        (Mnist, "MNIST", ("train", "t10k")),
        (FashionMnist, "FashionMNIST", ("train", "t10k")),
        (Emnist, "EMNIST", ("emnist-balanced-train", "emnist-balanced-test")),
    ],
)
def test_torchvision_itself_finds_the_files_there(write, tmp_path, source, folder, stems):
    """The call of the real class, which touches no network as its files are in place."""
    for stem in stems:
        write.idx(tmp_path / folder / f"raw/{stem}-images-idx3-ubyte", images(2, 28, 28))
        write.idx(tmp_path / folder / f"raw/{stem}-labels-idx1-ubyte", np.zeros(2, np.uint8))
    source(root=tmp_path)._fetch()
    assert len(source(root=tmp_path).load().x) == 2


def test_torchvision_has_the_classes_that_download():
    module = importlib.import_module("torchvision.datasets")
    for layout in files.LAYOUTS.values():
        assert not layout.torchvision or hasattr(module, layout.torchvision)


# image folders


def paint(
    path: Path, colour: tuple[int, int, int] | int, size: tuple[int, int] = (20, 10)
) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(path)


@pytest.mark.parametrize("test", ["test", "val"])
def test_folder_with_a_test_set(tmp_path, test):
    paint(tmp_path / "train/cat/1.png", (255, 0, 0))
    paint(tmp_path / "train/cat/2.png", 7)
    paint(tmp_path / "train/dog/1.png", (0, 255, 0), (5, 9))
    paint(tmp_path / f"{test}/dog/1.png", (0, 0, 255))
    (tmp_path / "train/dog/notes.txt").write_text("no image")
    data = Folder(path=tmp_path, size=8).load()
    assert_sound(data)
    assert (data.x.shape, data.x.dtype) == ((3, 3, 8, 8), np.uint8)
    assert data.classes == ("cat", "dog")
    assert (data.y.tolist(), data.test_y.tolist()) == ([0, 0, 1], [1])
    assert data.x[:, :, 4, 4].tolist() == [[255, 0, 0], [7, 7, 7], [0, 255, 0]]
    grey = Folder(path=tmp_path, size=4, channels=1).load()
    assert grey.x.shape == (3, 1, 4, 4)
    assert grey.x[1, 0, 0, 0] == 7


def test_folder_is_read_as_by_torchvision(tmp_path):
    datasets = importlib.import_module("torchvision.datasets")
    for place in ("train/b/x/2", "train/b/1", "train/a/1", "val/b/1"):
        paint(tmp_path / f"{place}.png", (*map(ord, place[-3:]),), (8, 8))
    data = Folder(path=tmp_path, size=8).load()
    train = datasets.ImageFolder(tmp_path / "train")
    assert data.classes == tuple(train.classes)
    assert data.y.tolist() == train.targets
    for x, (image, _) in zip(data.x, train, strict=True):
        np.testing.assert_array_equal(x.transpose(1, 2, 0), np.asarray(image))


def test_folder_with_a_test_and_a_validation_set(tmp_path):
    for place in ("train/a", "train/b", "test/a", "val/b"):
        paint(tmp_path / f"{place}/1.png", 3)
    assert Folder(path=tmp_path).load().test_y.tolist() == [0]


@pytest.mark.parametrize("train", ["", "train/"])
def test_folder_that_is_split(tmp_path, train):
    for label in ("a", "b"):
        for i in range(10):
            paint(tmp_path / f"{train}{label}/{i}.png", i)
    data = Folder(path=tmp_path, channels=1, test_fraction=0.3).load()
    assert_sound(data)
    assert np.bincount(data.y).tolist() == [7, 7]
    assert np.bincount(data.test_y).tolist() == [3, 3]
    both = np.concatenate([data.x, data.test_x])[:, 0, 0, 0]
    assert sorted(both.tolist()) == sorted([*range(10)] * 2)


def test_folder_errors(tmp_path):
    def load() -> Dataset:
        return Folder(path=tmp_path / "d").load()

    with pytest.raises(DataError, match=rf"{tmp_path}/d: is not a folder"):
        load()
    (tmp_path / "d").mkdir()
    with pytest.raises(DataError, match=rf"{tmp_path}/d: has no class folders"):
        load()
    paint(tmp_path / "d/test/cat/1.png", 0)
    with pytest.raises(DataError, match=rf"{tmp_path}/d: has test/ but no train/"):
        load()
    paint(tmp_path / "d/train/cat/1.png", 0)
    (tmp_path / "d/train/dog").mkdir()
    with pytest.raises(DataError, match=r"d/train/dog: contains no images"):
        load()
    paint(tmp_path / "d/train/dog/1.png", 0)
    paint(tmp_path / "d/test/dogs/1.png", 0)
    with pytest.raises(DataError, match=r"d/test/dogs: not a class of .*; did you mean 'dog'\?"):
        load()


def test_folder_with_a_link_that_goes_round_in_circles(tmp_path):
    for name in ("cat/1", "cat/more/2", "dog/1", "dog/2"):
        paint(tmp_path / f"{name}.png", 0)
    (tmp_path / "cat/more/again").symlink_to(tmp_path)
    data = Folder(path=tmp_path, size=4, test_fraction=0.5).load()
    assert len(data.y) + len(data.test_y) == 4


def test_folder_with_an_empty_test_set(tmp_path):
    paint(tmp_path / "train/cat/1.png", 0)
    (tmp_path / "test/cat").mkdir(parents=True)
    with pytest.raises(DataError, match=rf"{tmp_path}/test: contains no images"):
        Folder(path=tmp_path).load()


@pytest.mark.parametrize("damage", [b"", b"no image at all", "cut"])
def test_folder_with_an_unreadable_image(tmp_path, damage):
    bad = tmp_path / "train/cat/2.png"
    paint(tmp_path / "train/cat/1.png", 0)
    paint(bad, (1, 2, 3), (200, 200))
    bad.write_bytes(bad.read_bytes()[:60] if damage == "cut" else damage)
    with pytest.raises(DataError, match=r"train/cat/2\.png: cannot be read: .+"):
        Folder(path=tmp_path).load()


def test_folder_with_too_few_images_to_split(tmp_path):
    for name in ("a/1", "a/2", "a/3", "b/1"):
        paint(tmp_path / f"{name}.png", 0)
    with pytest.raises(DataError, match=r"class 'b' has 1 example; .* at least 2 per class"):
        Folder(path=tmp_path).load()


# npz


def save(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def test_npz_that_is_split(tmp_path):
    x, y = images(20, 3, 4, 4), np.arange(20) % 4
    path = save(tmp_path / "a.npz", x=x, y=y, row=np.arange(20))
    data = Npz(path=path).load()
    assert_sound(data)
    assert data.x.dtype == np.uint8
    assert data.classes == ("0", "1", "2", "3")
    assert np.bincount(data.test_y).tolist() == [1] * 4
    np.testing.assert_array_equal(data.x, x[data.columns["row"]])
    np.testing.assert_array_equal(data.y, y[data.columns["row"]])


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, np.bool_])
def test_npz_with_a_test_set(tmp_path, dtype):
    x = rng.integers(0, 2, (6, 5)).astype(dtype)
    site = np.array(list("ababab"))
    y = np.array([0, 1, 2] * 2, np.uint8)
    path = save(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2], site=site)
    data = Npz(path=path).load()
    assert_sound(data)
    assert data.x.dtype == np.float32
    np.testing.assert_array_equal(data.x, x.astype(np.float32))
    assert data.columns["site"].tolist() == list("ababab")


X, Y = np.zeros((4, 3)), np.array([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, r"a\.npz: has no array 'y'; known: x"),
        ({"images": X, "y": Y}, r"a\.npz: has no array 'x'; known: images, y"),
        (
            {"x_train": X, "y_trian": Y},
            r"has no array 'y_train'; did you mean 'y_trian'\?",
        ),
        ({"x_train": X, "y_train": Y, "x_tests": X, "y_test": Y}, r"'x_tests' has shape \(4, 3\)"),
        ({"x_train": X, "y_train": Y, "y_test": Y}, r"has no array 'x_test'"),
        ({"X": X, "Y": Y}, r"has no array 'x_train'; known: X, Y"),
        ({"x": X, "y": Y[:3]}, r"'y' has 3 labels for 4 inputs in 'x'"),
        ({"x": X, "y": Y - 1}, r"'y' has the negative label -1 at 0"),
        ({"x": X, "y": Y / 2}, r"'y' is float64 of shape \(4,\), expected integers"),
        ({"x": X, "y": Y[:, None]}, r"'y' is int64 of shape \(4, 1\), expected integers"),
        (
            {"x": X, "y": np.array([0, 0, 2**64 - 1, 1], np.uint64)},
            r"'y' has the negative label -1 at 2",
        ),
        ({"x": X[0], "y": Y}, r"'x' is float64 of shape \(3,\), expected numbers of shape"),
        ({"x": X[:0], "y": Y[:0]}, r"'x', of shape \(0, 3\), is empty"),
        ({"x": X.astype(str), "y": Y}, r"'x' is <U32 of shape \(4, 3\), expected numbers"),
        ({"x": X + np.nan, "y": Y}, r"'x' is not finite in float32 in example 0"),
        ({"x": X + 1e300, "y": Y}, r"'x' is not finite in float32 in example 0"),
        ({"x": X, "y": Y, "site": Y[:3]}, r"'site' has shape \(3,\); a column has shape \(4,\)"),
        ({"x": X, "y": np.array([0, 0, 0, 1])}, r"class '1' has 1 example"),
        (
            {"x_train": X, "y_train": Y, "x_test": X[:, :2], "y_test": Y},
            r"'x_test' has float32 inputs of shape \(2,\), 'x_train' float32 of \(3,\)",
        ),
        ({"x": X.astype(object), "y": Y}, r"a\.npz: cannot be read: Object arrays"),
    ],
)
def test_npz_errors(tmp_path, arrays, message):
    with pytest.raises(DataError, match=message):
        Npz(path=save(tmp_path / "a.npz", **arrays)).load()


def test_npz_that_cannot_be_read(tmp_path):
    path = save(tmp_path / "a.npz", x=X, y=Y)
    whole = path.read_bytes()
    for content in (b"", b"PK\x03\x04", whole[:100], whole[:-30], b"no archive"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.npz: cannot be read: .+"):
            Npz(path=path).load()
    np.save(tmp_path / "b.npy", X)
    with pytest.raises(DataError, match=r"b\.npy: is not an \.npz archive of named arrays"):
        Npz(path=tmp_path / "b.npy").load()
    with pytest.raises(DataError, match=r"c\.npz: cannot be read: No such file or directory"):
        Npz(path=tmp_path / "c.npz").load()


def test_split_smaller_than_the_classes(tmp_path):
    path = save(tmp_path / "a.npz", x=X, y=Y)
    with pytest.raises(DataError, match=r"a\.npz: 4 examples of 2 classes .* test_fraction=0\.2"):
        Npz(path=path).load()
    assert len(Npz(path=path, test_fraction=0.5).load().test_y) == 2


# tables


@pytest.fixture
def frame() -> pd.DataFrame:
    rows = 20
    return pd.DataFrame(
        {
            "age": np.arange(rows),
            "dose": np.arange(rows) / 8,
            "sick": ["yes", "no"] * (rows // 2),
            "site": ["north"] * 5 + ["south"] * 15,
            "fit": [True, False] * (rows // 2),
        }
    )


def store(frame: pd.DataFrame, path: Path) -> Path:
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path)
    return path


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_table_that_is_split(frame, tmp_path, suffix):
    path = store(frame, tmp_path / f"a{suffix}")
    data = Table(path=path, label="sick", columns=("site", "age")).load()
    assert_sound(data)
    assert data.classes == ("no", "yes")
    assert data.features == ("dose", "fit")  # age is a column now
    assert data.target == "sick"
    assert data.x.dtype == np.float32
    rows = data.columns["age"]
    np.testing.assert_array_equal(data.x[:, 0], rows / 8)
    np.testing.assert_array_equal(data.x[:, 1], rows % 2 == 0)
    np.testing.assert_array_equal(data.y, rows % 2 == 0)
    np.testing.assert_array_equal(data.columns["site"], np.where(rows < 5, "north", "south"))
    assert data.columns["site"].dtype.kind == "U"
    assert np.bincount(data.test_y).tolist() == [2, 2]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_table_with_a_test_file(frame, tmp_path, suffix):
    train = store(frame[:12], tmp_path / f"a{suffix}")
    test = store(frame[::-1][:4], tmp_path / f"b{suffix}")
    source = Table(path=train, label="sick", features=("dose", "age"), test_path=test)
    data = source.load()
    assert_sound(data)
    assert (len(data.x), len(data.test_x)) == (12, 4)
    assert data.features == ("dose", "age")
    np.testing.assert_array_equal(data.test_x[:, 1], [19, 18, 17, 16])
    assert data.test_y.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ([10, 9, 2], ("2", "9", "10")),
        ([0.5, -1.5, 2.0], ("-1.5", "0.5", "2.0")),
        ([True, False, True], ("False", "True")),
        (["b", "a", "c"], ("a", "b", "c")),
    ],
)
def test_table_labels_of_any_type(tmp_path, labels, classes):
    table = pd.DataFrame({"x": np.arange(12), "y": labels * 4})
    data = Table(path=store(table, tmp_path / "a.csv"), label="y", test_fraction=0.25).load()
    assert data.classes == classes
    expected = [classes.index(str(labels[int(x) % 3])) for x in data.x[:, 0]]
    assert data.y.tolist() == expected


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("of", [{"label": "y"}, {"target": "x"}], ids=["label", "target"])
def test_a_column_of_a_table_that_was_not_loaded_is_no_partition(tmp_path, of, in_place):
    table = pd.DataFrame({"x": np.arange(12.0), "y": [0, 1] * 6, "z": [0.5] * 12})
    table = table.assign(site=["a", "b", "c"] * 4, ward=["d", "e"] * 6)
    path = store(table, tmp_path / "a.parquet")
    source = Table(
        path=path, **of, features=["z"], columns=["ward"], in_place=in_place, test_fraction=0.25
    )
    by_site = partitions.parse({"kind": "natural", "column": "site"})
    with pytest.raises(
        DataError,
        match=r"^partition.column='site': the column has not been loaded; add "
        r"data\.columns=\[ward, site\]$",
    ):
        by_site.deal(source.load(), 0)
    loaded = source.model_copy(update={"columns": ("ward", "site")}).load()
    assert len(by_site.deal(loaded, 0)) == 3


def test_table_of_nullable_parquet_columns(tmp_path):
    table = pd.DataFrame({"x": np.arange(10), "y": [0, 1] * 5}).convert_dtypes()
    data = Table(path=store(table, tmp_path / "a.parquet"), label="y").load()
    assert_sound(data)
    table.loc[3, "x"] = pd.NA
    with pytest.raises(DataError, match=r"row 4: column 'x' is empty \(1 of 10 rows"):
        Table(path=store(table, tmp_path / "a.parquet"), label="y").load()


def changed(frame: pd.DataFrame, column: str, row: int, value: object) -> pd.DataFrame:
    values = frame[column].astype(object)
    values[row] = value
    return frame.assign(**{column: values})


@pytest.mark.parametrize(
    ("column", "value", "fields", "message"),
    [
        ("age", None, {}, r"a\.csv: line 9: column 'age' is empty \(1 of "),
        ("sick", None, {}, r"a\.csv: line 9: column 'sick' is empty \(1 of "),
        ("site", None, {"columns": ("site",)}, r"line 9: column 'site' is empty"),
        ("age", "old", {}, r"a\.csv: column 'age' has 'old' in row 8, expected a number"),
        ("age", "old", {"features": ("age",)}, r"column 'age' has 'old' in row 8, expected a num"),
        ("age", 1e300, {}, r"column 'age' has 1e\+300 in row 8, not finite in float32"),
        ("age", 7, {"features": ("site",)}, r"column 'site' has 'north' in row 1, expected a num"),
        ("age", 7, {"features": ("dosis",)}, r"has no column 'dosis'; did you mean 'dose'\?"),
        ("age", 7, {"columns": ("sites",)}, r"has no column 'sites'; did you mean 'site'\?"),
        ("age", 7, {"label": "sic"}, r"has no column 'sic'; did you mean 'sick'\?"),
        ("sick", "perhaps", {}, r"a\.csv: class 'perhaps' has 1 example"),
    ],
)
def test_table_errors(frame, tmp_path, column, value, fields, message):
    path = store(changed(frame, column, 7, value), tmp_path / "a.csv")
    with pytest.raises(DataError, match=message):
        Table(**{"path": path, "label": "sick", **fields}).load()


def test_table_file_errors(frame, tmp_path):
    def load(name: str, content: bytes) -> Dataset:
        (tmp_path / name).write_bytes(content)
        return Table(path=tmp_path / name, label="y").load()

    with pytest.raises(DataError, match=r"a\.xlsx: is neither \.csv nor \.parquet"):
        load("a.xlsx", b"")
    with pytest.raises(DataError, match=r"a\.csv: cannot be read: No columns to parse"):
        load("a.csv", b"")
    with pytest.raises(DataError, match=r"a\.csv: has no rows"):
        load("a.csv", b"x,y\n")
    with pytest.raises(DataError, match=r"a\.csv: cannot be read: .*Expected 2 fields in line 3"):
        load("a.csv", b"x,y\n1,2\n1,2,3,4\n")
    with pytest.raises(
        DataError, match=r"a\.csv: cannot be read: Length of header .* does not match"
    ):
        load("a.csv", b"x,y\n1,2,3\n4,5,6\n")
    with pytest.raises(DataError, match=r"a\.csv: cannot be read: .*codec can't decode"):
        load("a.csv", b"x,y\n\xff\xfe,1\n")
    with pytest.raises(DataError, match=r"a\.csv: has no numeric columns to use as features"):
        load("a.csv", b"x,y\na,1\nb,2\n")
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read: .+"):
        load("a.parquet", b"PAR1 and no more")
    with pytest.raises(DataError, match=r"none\.csv: cannot be read: No such file"):
        Table(path=tmp_path / "none.csv", label="y").load()
    texts = store(frame.assign(age=frame["age"].astype(str)), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"column 'age' has '0' in row 1, expected a number"):
        Table(path=texts, label="sick").load()


def test_table_test_file_errors(frame, tmp_path):
    train = store(frame, tmp_path / "a.csv")
    test = store(frame.drop(columns="dose"), tmp_path / "b.csv")
    with pytest.raises(DataError, match=r"b\.csv: has no column 'dose'; known: age, fit"):
        Table(path=train, label="sick", test_path=test).load()
    store(frame.assign(sick=1), test)
    with pytest.raises(
        DataError, match=r"b\.csv: label column 'sick' is int64, but <U3 in .*a\.c"
    ):
        Table(path=train, label="sick", test_path=test).load()


def test_table_label_cannot_be_a_feature(tmp_path):
    with pytest.raises(ValidationError, match="the label 'age' cannot be a feature as well"):
        Table(path=tmp_path, label="age", features=("dose", "age"))


def test_table_that_is_scaled(frame, tmp_path):
    train = store(frame[2:12].assign(fit=1), tmp_path / "a.csv")
    test = store(frame.assign(fit=range(20)), tmp_path / "b.csv")
    data = Table(path=train, label="sick", test_path=test, scale="minmax").load()
    assert_sound(data)
    assert data.x.dtype == np.float32
    assert data.features == ("age", "dose", "fit")
    for column in (0, 1):
        np.testing.assert_allclose(data.x[:, column], np.arange(10) / 9, rtol=1e-6)
        np.testing.assert_allclose(data.test_x[:, column], (np.arange(20) - 2) / 9, rtol=1e-6)
    assert (data.x[:, 2] == 0).all()
    assert (data.test_x[:, 2] == 0).all()


# tables with a target


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_table_with_a_target_that_is_split(frame, tmp_path, suffix):
    path = store(frame.assign(price=frame["age"] ** 2 / 3), tmp_path / f"a{suffix}")
    data = Table(path=path, target="price", columns=("site", "age")).load()
    assert_sound(data)
    assert (data.classes, data.features, data.target) == ((), ("dose", "fit"), "price")
    rows = data.columns["age"]
    np.testing.assert_array_equal(data.x[:, 0], rows / 8)
    np.testing.assert_array_equal(data.y, rows**2 / 3)
    np.testing.assert_array_equal(data.columns["site"], np.where(rows < 5, "north", "south"))
    assert (len(data.y), len(data.test_y)) == (16, 4)


@pytest.mark.parametrize("scale", ["none", "minmax"])
def test_table_with_a_target_and_a_test_file(frame, tmp_path, scale):
    train = store(frame[2:12], tmp_path / "a.csv")
    test = store(frame[::-1], tmp_path / "b.csv")
    source = Table(path=train, target="age", features=("fit", "dose"), test_path=test, scale=scale)
    data = source.load()
    assert_sound(data)
    low, span = (2, 9) if scale == "minmax" else (0, 1)
    np.testing.assert_array_equal(data.y, (np.arange(2, 12) - low) / span)
    np.testing.assert_array_equal(data.test_y, (np.arange(20)[::-1] - low) / span)
    dose = data.y if scale == "minmax" else data.y / 8
    np.testing.assert_array_equal(data.x[:, 1], dose)
    assert (data.features, data.target) == (("fit", "dose"), "age")


@pytest.mark.parametrize(
    ("column", "value", "fields", "message"),
    [
        ("age", None, {}, r"a\.csv: line 9: column 'age' is empty \(1 of "),
        ("age", "old", {}, r"a\.csv: column 'age' has 'old' in row 8, expected a number$"),
        ("age", np.inf, {}, r"a\.csv: column 'age' has inf in row 8, not finite in float64"),
        ("dose", np.inf, {}, r"a\.csv: column 'dose' has inf in row 8, not finite in float64"),
        ("age", 7, {"target": "sick"}, r"column 'sick' has 'yes' in row 1, expected a number$"),
        ("age", 7, {"target": "ag"}, r"has no column 'ag'; did you mean 'age'\?"),
        (
            "dose",
            "much",
            {},
            r"column 'dose' has 'much' in row 8, expected a number \(data\.features names the col",
        ),
        ("age", 7, {"test_fraction": 0.99}, r"a\.csv: 20 examples cannot be split with test_fr"),
    ],
)
def test_table_target_errors(frame, tmp_path, column, value, fields, message):
    path = store(changed(frame, column, 7, value), tmp_path / "a.csv")
    with pytest.raises(DataError, match=message):
        Table(**{"path": path, "target": "age", **fields}).load()


def test_table_takes_numbers_that_float32_cannot_hold_where_it_is_a_regression(frame, tmp_path):
    path = store(changed(frame, "dose", 7, 1e300), tmp_path / "a.csv")
    assert Table(path=path, target="age").load().x.max() == 1e300


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"needs either a label \(a column of classes\) or a target .*, and neither is given"),
        ({"label": "a", "target": "b"}, r"either a label .* or a target .*, and both are given"),
        ({"target": "a", "features": ("a",)}, "the target 'a' cannot be a feature as well"),
    ],
)
def test_table_predicts_one_thing(tmp_path, fields, message):
    with pytest.raises(ValidationError, match=message):
        Table(path=tmp_path, **fields)


@pytest.mark.parametrize("keys", [{"label": "ill"}, {"target": "b"}])
@pytest.mark.parametrize("digits", [400, 5000])
def test_numbers_beyond_floats(tmp_path: Path, keys: dict[str, str], digits: int) -> None:
    path = tmp_path / "t.csv"
    rows = [f"{i},{'9' * digits if i == 3 else i},{i % 2}" for i in range(40)]
    path.write_text("\n".join(["a,b,ill", *rows]))
    with pytest.raises(DataError, match=r"t\.csv: column 'b' has '?9999") as raised:
        load_dataset(datasets.parse({"name": "table", "path": str(path), **keys}))
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300
