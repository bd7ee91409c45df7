"""What models are asked about: rows, texts, files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsim.data import Dataset
from fedsim.errors import DataError
from fedsim.explain.inputs import Inputs


def images(channels: int = 1) -> Dataset:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (6, channels, 4, 5), dtype=np.uint8)
    y = np.arange(6) % 2
    return Dataset(x, y, x[::-1], y[::-1], ("cat", "dog"))


def table() -> Dataset:
    x = np.arange(12.0).reshape(4, 3)
    y = x.sum(axis=1)
    return Dataset(x, y, x, y, (), features=("a", "b", "c"), target="y")


def documents() -> Dataset:
    x = np.array([[2, 3, 0], [4, 0, 0]], np.int32)
    words = ("", "<unknown>", "good", "bad", "beer")
    marks = np.array([[True, False, False], [False, False, False]])
    y = np.array([1, 0])
    return Dataset(x, y, x, y, ("no", "yes"), words=words, marks=marks)


def test_rows_of_the_test_set() -> None:
    data = images()
    found = Inputs.of_rows(data, [4, 0])
    np.testing.assert_array_equal(found.x, data.test_x[[4, 0]])
    assert found.names == ("row 4", "row 0")
    assert found.labels == ("dog", "dog")
    assert Inputs.of_rows(table(), [1]).labels == ("12",)
    found = Inputs.of_rows(documents(), [0, 1])
    assert found.words == (("good", "bad"), ("beer",))
    assert found.marks == ((True, False), (False,))


@pytest.mark.parametrize("row", [6, -1])
def test_no_such_row(row: int) -> None:
    with pytest.raises(DataError, match=f"^there is no row {row} in the test set; it has 6, "):
        Inputs.of_rows(images(), [row])


def test_texts(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text("Good, good beer and more\n\nBAD\n")
    found = Inputs.of_file(documents(), path)
    assert found.words == (("good", "good", "beer"), (), ("bad",))  # cut where the model ends
    np.testing.assert_array_equal(found.x, [[2, 2, 4], [0, 0, 0], [3, 0, 0]])
    assert found.names == ("line 1", "line 2", "line 3")
    assert found.labels == (None, None, None)
    np.testing.assert_array_equal(Inputs.of_texts(documents(), ["what?"], ["it"]).x, [[1, 0, 0]])
    assert Inputs.of_texts(documents(), ["what good what beyond"], ["it"]).unknown == ("what",)
    assert Inputs.of_rows(images(), [0]).unknown == ()
    as_they_stand = replace(documents(), spaced=True)
    found = Inputs.of_texts(as_they_stand, ["good beer !"], ["it"])
    assert found.words == (("good", "beer", "!"),)
    np.testing.assert_array_equal(Inputs.of_texts(as_they_stand, ["Good"], ["it"]).x, [[1, 0, 0]])


@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture(tmp_path: Path, channels: int) -> None:
    data = images(channels)
    pixels = data.x[2].transpose(1, 2, 0)
    Image.fromarray(pixels if channels == 3 else pixels[..., 0]).save(tmp_path / "it.png")
    found = Inputs.of_file(data, tmp_path / "it.png")
    np.testing.assert_array_equal(found.x, data.x[2:3])
    assert found.names == ("image 0",)


def test_arrays(tmp_path: Path) -> None:
    data = images()
    for x in (data.x, data.x[:2], data.x[0]):
        np.save(tmp_path / "it.npy", x)
        found = Inputs.of_file(data, tmp_path / "it.npy")
        np.testing.assert_array_equal(found.x, x.reshape(-1, 1, 4, 5))
    np.save(tmp_path / "ints.npy", np.arange(3))
    assert Inputs.of_file(table(), tmp_path / "ints.npy").x.dtype == np.float64


def test_rows_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("c,other,a,b\n3,x,1,2\n6,x,4,5\n")
    np.testing.assert_array_equal(Inputs.of_file(table(), path).x, [[1, 2, 3], [4, 5, 6]])


def test_files_that_will_not_do(tmp_path: Path) -> None:
    def write(name: str, content: bytes) -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    Image.new("L", (7, 4)).save(tmp_path / "wide.png")
    np.save(tmp_path / "wide.npy", np.zeros((2, 1, 4, 7), np.uint8))
    np.save(tmp_path / "real.npy", np.zeros((2, 1, 4, 5)))
    np.save(tmp_path / "none.npy", np.zeros((0, 1, 4, 5), np.uint8))
    for data, path, message in [
        (images(), tmp_path / "nowhere.png", "cannot be read: "),
        (images(), write("broken.png", b"no picture"), "cannot be read: "),
        (images(), tmp_path / "wide.png", "is 7 pixels wide and 4 high; those of the data are 5"),
        (
            images(),
            tmp_path / "wide.npy",
            r"\(2, 1, 4, 7\); one input of the data is \(1, 4",
        ),
        (images(), tmp_path / "real.npy", "holds float64; the data are uint8"),
        (images(), tmp_path / "none.npy", "there is nothing in it"),
        (images(), write("no.npy", b""), "cannot be read: "),
        (images(2), tmp_path / "wide.png", "inputs of these data are .npy"),
        (table(), write("gaps.csv", b"a,b,c\n1,,3\n"), "holds missing or infinite numbers"),
        (images(), write("it.jpeg", b""), "images are .png or .npy"),
        (table(), write("it.txt", b""), "rows of a table are .csv or .npy"),
        (table(), write("few.csv", b"a,b\n1,2\n"), "has no column 'c'; its first line must name"),
        (table(), write("words.csv", b"a,b,c\n1,2,x\n"), "cannot be read: could not convert"),
        (documents(), write("it.doc", b""), "documents are .txt, one a line"),
        (documents(), write("empty.txt", b""), "there is nothing in it"),
        (documents(), write("latin.txt", b"caf\xe9"), "byte 0xe9 is not utf-8; save the"),
    ]:
        with pytest.raises(DataError, match=f"^{path}:.*{message}"):
            Inputs.of_file(data, path)
    with pytest.raises(DataError, match="the data are no documents"):
        Inputs.of_texts(images(), ["x"], ["x"])
