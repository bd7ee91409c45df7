from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import refusals
from hypothesis import given
from hypothesis import strategies as st
from refusals import frame, medmnist
from sklearn.model_selection import train_test_split

from experiments import examples
from fedsim.data import Dataset, datasets, partitions
from fedsim.data.dataset import fitted, split_off
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
from fedsim.explain.inputs import Inputs

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
    assert len(Digits(test_fraction=0.5).load().test_y) == 899


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
        pytest.param(
            *("Fashion-MNIST", FashionMnist, [6000] * 10, [1000] * 10, 0.2860, 0.3530),
            marks=pytest.mark.night,  # it is read as MNIST is
        ),
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
    data, _ = fitted(Mortgage(root=real_data("Mortgage")).load())
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


def test_mnist_files(write, tmp_path):
    x, test_x = images(12, 28, 28), images(5, 28, 28)
    write.idx_pair(tmp_path / "MNIST/raw", "train", x, np.arange(12) % 10)
    write.idx_pair(tmp_path / "MNIST/raw", "t10k", test_x, np.arange(5))
    data = Mnist(root=tmp_path).load()
    assert_sound(data)
    np.testing.assert_array_equal(data.x[:, 0], x)
    np.testing.assert_array_equal(data.test_x[:, 0], test_x)


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
    write.cifar_binary(tmp_path / "test_batch.bin.xz", x, np.array([1, 2, 3]))
    data = Cifar10(root=tmp_path).load()
    np.testing.assert_array_equal(data.x, x)
    assert data.y.tolist() == [4, 5, 6]


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


def leaf_user(first: int, count: int) -> tuple[list[list[float]], list[int]]:
    return [[(first + i) / 64] * 784 for i in range(count)], list(range(first, first + count))


def test_femnist(write, tmp_path):
    folder = tmp_path / "femnist/data"
    write.leaf(
        folder / "train/all_data_0.json", {"f0_1": leaf_user(0, 2), "f1_2": leaf_user(2, 3)}
    )
    users = {"f2_3": leaf_user(60, 2), "f3_0": ([], [])}
    write.leaf(folder / "train/all_data_1.json", users)
    write.leaf(folder / "test/all_data_0.json.gz", {"f0_1": leaf_user(5, 1)})
    data = Femnist(root=tmp_path).load()
    assert_sound(data)
    assert data.x.shape == (7, 1, 28, 28)
    assert data.y.tolist() == [0, 1, 2, 3, 4, 60, 61]
    assert data.columns["writer"].tolist() == ["f0_1"] * 2 + ["f1_2"] * 3 + ["f2_3"] * 2
    np.testing.assert_allclose(data.x[:, 0, 14, 14], data.y / 64)
    assert (data.classes[0], data.classes[10], data.classes[61]) == ("0", "A", "z")


@pytest.mark.parametrize("folder", ["", "medmnist"])
def test_medmnist_in_grey(tmp_path, folder):
    pixels = images(6, 28, 28)
    (content,) = medmnist(train_images=pixels).values()
    refusals.write(tmp_path / folder / "breastmnist.npz", content)
    data = MedMnist(root=tmp_path, set="breastmnist").load()
    assert_sound(data)
    np.testing.assert_array_equal(data.x[:, 0], pixels)
    assert (data.y.tolist(), data.test_y.tolist()) == ([0, 1, 0, 1, 0, 1], [0, 1, 0])
    assert data.classes == ("malignant", "normal, benign")
    assert data.mean == data.std == (0.5,)


def test_medmnist_in_colour(tmp_path):
    pixels = images(3, 28, 28, 3)
    (content,) = medmnist(train_images=images(6, 28, 28, 3), test_images=pixels).values()
    refusals.write(tmp_path / "pathmnist.npz", content)
    data = MedMnist(root=tmp_path, set="pathmnist").load()
    assert_sound(data)
    assert data.shape == (3, 28, 28)
    np.testing.assert_array_equal(data.test_x[:, 1], pixels[..., 1])
    assert (len(data.classes), data.classes[5]) == (9, "smooth muscle")


def numbers(count: int) -> bytes:
    """As KEEL has them: inputs called row and same, and an output that is linear in the row."""
    rows = [f"{i},7.5,{2 * i - 5}" for i in range(count)]
    names = [f"@attribute {name} real" for name in ("row", "same", "rate")]
    return "\r\n".join(["@relation numbers", *names, "@data", *rows]).encode()


def test_keel(write, tmp_path):
    data = Keel(path=write.raw(tmp_path / "a.dat", numbers(50))).load()
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


def test_mortgage_is_scaled(write, tmp_path, monkeypatch):
    write.raw(tmp_path / "mortgage/mortgage.dat.gz", numbers(20))
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path))
    data, _ = fitted(Mortgage(test_fraction=0.1).load())
    assert_sound(data)
    assert (len(data.x), len(data.test_x)) == (18, 2)
    assert (data.x.min(), data.x.max(), data.y.min(), data.y.max()) == (0, 1, 0, 1)


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
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path))
    source = Emnist(split="digits", download=True)
    assert len(source.load().x) == 2
    assert len(source.load().x) == 2
    assert len(source.model_copy(update={"root": tmp_path}).load().x) == 2
    assert asked == [(tmp_path, True, "digits")]


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


def test_folder_of_pictures_that_are_not_square(tmp_path):
    """The first number is the height."""
    for place in ("train/a/1", "train/b/1", "test/a/1"):
        paint(tmp_path / f"{place}.png", 9, (12, 30))
    data = Folder(path=tmp_path, size=(6, 4)).load()
    assert data.shape == (3, 6, 4)
    in_place = Folder(path=tmp_path, size=(6, 4), in_place=True).load()
    np.testing.assert_array_equal(np.asarray(in_place.x), data.x)
    found = Inputs.of_file(data, tmp_path / "test/a/1.png")
    np.testing.assert_array_equal(found.x, data.test_x)
    assert found.notes == ("1.png: 12×30 gray, resized to 4×6 RGB",)


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


def test_folder_with_a_link_that_goes_round_in_circles(tmp_path):
    for name in ("cat/1", "cat/more/2", "dog/1", "dog/2"):
        paint(tmp_path / f"{name}.png", 0)
    (tmp_path / "cat/more/again").symlink_to(tmp_path)
    data = Folder(path=tmp_path, size=4, test_fraction=0.5).load()
    assert len(data.y) + len(data.test_y) == 4


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


@examples(50)
@given(st.lists(st.integers(-1, 9), min_size=2, max_size=90), st.data())
def test_a_split_is_that_of_scikit_learn(labels: list[int], data: st.DataObject) -> None:
    y, aside = np.array(labels), data.draw(st.integers(1, len(labels) - 1))
    fits = np.unique(y, return_counts=True)[1]
    stratified = fits.min() > 1 and len(fits) <= min(aside, len(y) - aside)
    of, seed = (y if stratified else None), data.draw(st.integers(0, 2**32 - 1))
    expected = train_test_split(range(len(y)), test_size=aside, stratify=of, random_state=seed)
    found = split_off(aside, len(y), of, seed)
    assert [part.tolist() for part in found] == [sorted(part) for part in expected]


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


def store(frame: pd.DataFrame, path: Path) -> Path:
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path)
    return path


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_table_that_is_split(tmp_path, suffix):
    path = store(frame(), tmp_path / f"a{suffix}")
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


@pytest.mark.parametrize("scale", ["none", "minmax"])
def test_table_with_a_target_and_a_test_file(tmp_path, scale):
    train = store(frame()[2:12], tmp_path / "a.csv")
    test = store(frame()[::-1], tmp_path / "b.csv")
    source = Table(path=train, target="age", features=("fit", "dose"), test_path=test, scale=scale)
    data, _ = fitted(source.load())
    assert_sound(data)
    low, span = (2, 9) if scale == "minmax" else (0, 1)
    np.testing.assert_array_equal(data.y, (np.arange(2, 12) - low) / span)
    np.testing.assert_array_equal(data.test_y, (np.arange(20)[::-1] - low) / span)
    dose = data.y if scale == "minmax" else data.y / 8
    np.testing.assert_array_equal(data.x[:, 1], dose)
    assert (data.features, data.target) == (("fit", "dose"), "age")


def test_table_takes_numbers_that_float32_cannot_hold_where_it_is_a_regression(tmp_path):
    path = store(frame("dose", 1e300), tmp_path / "a.csv")
    assert Table(path=path, target="age").load().x.max() == 1e300
