"""What models are asked about: rows, texts, files."""

from __future__ import annotations

import struct
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from fedsim.data import Dataset
from fedsim.data.dataset import feature_names, fitted
from fedsim.data.sources.arrays import Npz
from fedsim.data.sources.generated import Digits
from fedsim.data.sources.images import Mnist
from fedsim.data.sources.keel import Keel, Mortgage
from fedsim.data.sources.tables import Scale, Table
from fedsim.data.sources.text import Text
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
    return Dataset(x, y, x, y, ("no", "yes"), words=words, truth={"signal": marks})


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
    for row in (6, -1):
        with pytest.raises(DataError, match=f"^there is no row {row} in the test set; it has 6, "):
            Inputs.of_rows(data, [row])


def test_texts(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text("Good, good beer and more\n\nBAD\n")
    found = Inputs.of_file(documents(), path)
    assert found.words == (("good", "good", "beer"), (), ("bad",))  # cut where the model ends
    np.testing.assert_array_equal(found.x, [[2, 2, 4], [0, 0, 0], [3, 0, 0]])
    assert found.names == ("line 1", "line 2", "line 3")
    assert found.labels == (None, None, None)
    np.testing.assert_array_equal(Inputs.of_texts(documents(), ["what?"], ["it"]).x, [[1, 0, 0]])
    notes = ("words that do not occur in the run's data: what",)
    assert Inputs.of_texts(documents(), ["what good what beyond"], ["it"]).notes == notes
    assert Inputs.of_texts(documents(), ["good beer"], ["it"]).notes == ()
    as_they_stand = replace(documents(), spaced=True)
    found = Inputs.of_texts(as_they_stand, ["good beer !"], ["it"])
    assert found.words == (("good", "beer", "!"),)
    np.testing.assert_array_equal(Inputs.of_texts(as_they_stand, ["Good"], ["it"]).x, [[1, 0, 0]])


def scene(size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    """Black on the left, white on the right."""
    picture = Image.new(mode, size, "black")
    picture.paste("white", (size[0] // 2, 0, *size))
    return picture


def test_a_picture_of_another_kind_and_size_is_converted(tmp_path: Path) -> None:
    """To gray pixels from the least to the greatest value that the data have."""
    tmp_path = tmp_path / "only here"
    tmp_path.mkdir()
    data = Digits().load()
    for name, made, note in [
        ("photo.png", scene((64, 48)), "photo.png: 64×48 RGB, resized to 8×8 gray"),
        ("photo.JPG", scene((64, 48), "L"), "photo.JPG: 64×48 gray, resized to 8×8 gray"),
        ("small.png", scene((8, 8), "RGBA"), "small.png: 8×8 RGBA, converted to gray"),
    ]:
        made.save(tmp_path / name)
        found = Inputs.of_file(data, tmp_path / name)
        assert found.notes == (note,)
        assert (found.names, found.suffix) == ((name,), f"-{name[:5]}")
        assert found.x.dtype == data.x.dtype
        np.testing.assert_allclose(found.x[0, 0, :, [0, -1]], [[0] * 8, [1] * 8], atol=0.003)
    colour = Inputs.of_file(images(3), tmp_path / "photo.JPG")
    assert colour.notes == ("photo.JPG: 64×48 gray, resized to 5×4 RGB",)
    assert (colour.x.shape, colour.x.dtype) == ((1, 3, 4, 5), np.uint8)
    assert colour.x[0, :, :, -1].min() > 250


def test_a_folder_of_pictures(tmp_path: Path) -> None:
    folder = tmp_path / "of a test" / "my pictures"
    folder.mkdir(parents=True)
    for name, size in {"b.jpg": (20, 10), "a.png": (20, 10), "c.png": (5, 4)}.items():
        scene(size).save(folder / name)
    (folder / "notes.txt").write_text("of the pictures")
    (folder / ".a.png").write_bytes(b"what a file manager leaves")
    found = Inputs.of_file(images(), folder)
    assert found.names == ("a.png", "b.jpg", "c.png")
    assert found.suffix == "-my-pictures"
    assert found.notes == (
        "my pictures: 1 hidden or system item ignored: .a.png",
        "my pictures: 2 pictures of 20×10 RGB, resized to 5×4 gray",
        "my pictures: 1 picture of 5×4 RGB, converted to gray",
    )
    (folder / "d.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"d\.png: cannot be read: "):
        Inputs.of_file(images(), folder)


def test_other_inputs_have_other_names_of_files(tmp_path: Path) -> None:
    data = images()
    assert Inputs.of_rows(data, []).suffix == ""
    assert Inputs.of_rows(data, [3]).suffix == "-row-3"
    assert Inputs.of_rows(data, [3, 0]).suffix == "-rows-3-0"
    many = [Inputs.of_rows(data, [0] * 9 + [k]).suffix for k in (1, 2)]
    assert many[0].startswith("-rows-0-and-9-more-")
    assert many[0] != many[1]
    text = Inputs.of_texts(documents(), ["good, / beer"], ["it"])
    assert text.suffix == "-text-good-beer"
    long = Inputs.of_texts(documents(), ["beer " * 99], ["it"]).suffix
    assert 30 < len(long) < 50

    # Of one name in neighbouring folders.
    paths = [tmp_path / name for name in ("a/0.png", "b/0.png", "b/1.png")]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        scene((8, 8)).save(path)
    found = [Inputs.of_file(data, path).suffix for path in paths]
    assert found == ["-a-0", "-b-0", "-1"]


def test_arrays_and_rows_of_a_file(tmp_path: Path) -> None:
    data = images()
    for x in (data.x[:2], data.x[0]):
        np.save(tmp_path / "it.npy", x)
        found = Inputs.of_file(data, tmp_path / "it.npy")
        np.testing.assert_array_equal(found.x, x.reshape(-1, 1, 4, 5))
    np.save(tmp_path / "ints.npy", np.arange(3))
    assert Inputs.of_file(table(), tmp_path / "ints.npy").x.dtype == np.float64
    path = tmp_path / "rows.csv"
    path.write_text("c,other,a,b\n3,x,1,2\n6,x,4,5\n")
    np.testing.assert_array_equal(Inputs.of_file(table(), path).x, [[1, 2, 3], [4, 5, 6]])


RNG = np.random.default_rng(1)
SCALES: tuple[Scale, ...] = ("none", "minmax")
MEASURED = pd.DataFrame(
    {
        "size": RNG.normal(900, 300, 60).round(1),
        "same": 7.5,
        "count": RNG.integers(0, 40, 60),
        "smokes": RNG.random(60) < 0.5,
        "ward": RNG.choice(["a", "b"], 60),
    }
)


def rows_of_source(of: str, folder: Path) -> tuple[Dataset, Dataset]:
    """The data of a source, and of one that does nothing to them."""
    path, (kind, _, about) = folder / "all.csv", of.partition(" ")
    if kind == "table":
        predicts, _, scale = about.partition(" ")
        MEASURED.to_csv(path, index=False)
        fields = {predicts: "ward" if predicts == "label" else "size", "categorical": "none"}
        raw = Table(path=path, **fields)
        return fitted(raw.model_copy(update={"scale": scale}).load())[0], raw.load()
    if kind == "npz":
        x, y = (255 * RNG.random((20, 3))).astype(about), np.arange(20) % 2
        np.savez(path.with_suffix(".npz"), x_train=x, y_train=y, x_test=x[:5], y_test=y[:5])
        data = Npz(path=path.with_suffix(".npz")).load()
        return data, replace(data, test_x=x[:5])
    lines = [f"@attribute {name} real" for name in ("row", "same", "rate")]
    rows = [f"{3 * k + 0.1},7.5,{2 * k - 5}" for k in range(50)]
    path = folder / "mortgage.dat"
    path.write_text("\n".join(["@relation numbers", *lines, "@data", *rows]))
    source = Mortgage(root=folder) if kind == "mortgage" else Keel(path=path, scale="minmax")
    return fitted(source.load())[0], Keel(path=path).load()


@pytest.mark.parametrize("ending", [".csv", ".npy"])
@pytest.mark.parametrize(
    "of",
    [
        *(f"table {predicts} {scale}" for predicts in ("label", "target") for scale in SCALES),
        *("keel", "mortgage", "npz uint8", "npz bool", "npz int64", "npz float64"),
    ],
)
def test_rows_as_their_file_has_them(tmp_path: Path, of: str, ending: str) -> None:
    data, raw = rows_of_source(of, tmp_path)
    path = tmp_path / f"some{ending}"
    if ending == ".csv":
        names = feature_names(raw.shape[0], raw.features)
        pd.DataFrame(raw.test_x, columns=list(names)).to_csv(path, index=False)
    else:
        np.save(path, raw.test_x)
    found = Inputs.of_file(data, path)
    assert found.x.dtype == data.x.dtype
    np.testing.assert_array_equal(found.x, data.test_x)
    if not data.classes:
        labels = Inputs.of_rows(data, range(len(raw.test_y))).labels
        assert labels == tuple(f"{y:.6g}" for y in raw.test_y)
    if of.startswith("table") and ending == ".csv":  # the very file, with the other columns
        known = {tuple(row) for row in np.concatenate([data.x, data.test_x]).tolist()}
        everything = Inputs.of_file(data, tmp_path / "all.csv").x
        assert known == {tuple(row) for row in everything.tolist()}


def test_digits_as_scikit_learn_has_them(tmp_path: Path) -> None:
    data = Digits().load()
    known = load_digits()
    np.save(tmp_path / "all.npy", known.images[:, None])
    found = Inputs.of_file(data, tmp_path / "all.npy").x
    assert found.dtype == np.float32
    loaded = zip(map(bytes, (*data.x, *data.test_x)), (*data.y, *data.test_y), strict=True)
    assert {*loaded} == {*zip(map(bytes, found), known.target, strict=True)}


def test_images_of_official_files_as_they_have_them(tmp_path: Path) -> None:
    x = RNG.integers(0, 256, (12, 28, 28), dtype=np.uint8)
    for part, rows in (("train", 12), ("t10k", 4)):
        for kind, array in (("images-idx3", x[:rows]), ("labels-idx1", np.arange(rows) % 10)):
            header = struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape)
            content = header + array.astype(np.uint8).tobytes()
            (tmp_path / f"{part}-{kind}-ubyte").write_bytes(content)
    data = Mnist(root=tmp_path).load()
    Image.fromarray(x[2]).save(tmp_path / "it.png")
    np.save(tmp_path / "it.npy", x[2:3])
    for name in ("it.png", "it.npy"):
        found = Inputs.of_file(data, tmp_path / name)
        np.testing.assert_array_equal(found.x, data.test_x[2:3])
        assert found.notes == ()


@pytest.mark.filterwarnings("ignore:.*words get random vectors")
def test_documents_as_their_file_has_them(tmp_path: Path) -> None:
    texts = ["Good, good beer\x85 and more", "", "BAD\u2028 beer!", "so-so", "don't", "fine"]
    texts += ["Don’t – “naïve café”", "ＦＩＮＥ 这很好", "น้ำชา · col·lecció", "צה״ל 👍🏽"]
    lines = [f"{'ab'[k % 2]}\t{text}" for k, text in enumerate(texts)]
    (tmp_path / "all.txt").write_text("\n".join(lines), "utf-8")
    path = tmp_path / "all.txt"
    data = Text(path=path, test_path=path).load()
    for form in ("NFC", "NFD"):
        again = unicodedata.normalize(form, "\n".join(texts))
        (tmp_path / "texts.TXT").write_text(again + "\n", "utf-8")
        found = Inputs.of_file(data, tmp_path / "texts.TXT")
        np.testing.assert_array_equal(found.x, data.test_x)
        assert found.notes == ()


OF_IMAGES = "images must be .bmp, .*, .png, .* or .npy files, or a folder of pic"
OF_BYTES = "the data are whole numbers from 0 to 255"
# Files by the data that they are not of.
UNFIT: dict[str, dict[str, tuple[bytes | None, str]]] = {
    "images": {
        "nowhere.png": (None, "there is no such file"),
        "broken.png": (b"no picture", "cannot be read: "),
        "deep.tif": (None, "cannot be read: it has pixels of type I, .*; save it"),
        "empty": (None, "contains no pictures .*.png"),
        "wide.npy": (None, r"\(2, 1, 4, 7\); one input of the data is \(1, 4"),
        "real.npy": (None, "contains float64; the data are uint8"),
        "none.npy": (None, "is empty"),
        "no.npy": (b"", "cannot be read: "),
        "it.svg": (b"", OF_IMAGES),
    },
    "two channels": {"wide.png": (None, "inputs of these data must be .npy")},
    "table": {
        "empty": (None, "rows of a table must be .csv, .tsv"),
        "gaps.csv": (b"a,b,c\n1,,3\n", "line 2: column 'b' is empty"),
        "long.csv": (b"a,b,c\n1,2,3,4\n", "cannot be read: Length of header"),
        "none.csv": (b"a,b,c\n", "has no rows"),
        "few.csv": (b"a,b\n1,2\n", "has no column 'c'; its first line must name"),
        "words.csv": (b"a,b,c\n1,2,x\n", "column 'c' has 'x' in row 1, expected a"),
    },
    "bytes": {
        "half.csv": (b"x1,x2\n1,0.5\n", OF_BYTES),
        "many.csv": (b"x1,x2\n1,256\n", OF_BYTES),
    },
    "documents": {
        "it.doc": (b"", "documents must be .txt files"),
        "empty.txt": (b"", "is empty"),
        "latin.txt": (b"caf\xe9", "byte 0xe9 is not utf-8; save the"),
    },
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in UNFIT.items() for name in names]
)
def test_files_that_will_not_do(tmp_path: Path, kind: str, name: str) -> None:
    x, y = np.zeros((2, 2), np.uint8), np.arange(2)
    data = {"images": images(), "two channels": images(2), "table": table()}
    data |= {"bytes": Dataset(x, y, x, y, ("no", "yes")), "documents": documents()}
    Image.new("L", (7, 4)).save(tmp_path / "wide.png")
    Image.fromarray(np.zeros((4, 5), np.int32)).save(tmp_path / "deep.tif")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".hidden.png").touch()
    np.save(tmp_path / "wide.npy", np.zeros((2, 1, 4, 7), np.uint8))
    np.save(tmp_path / "real.npy", np.zeros((2, 1, 4, 5)))
    np.save(tmp_path / "none.npy", np.zeros((0, 1, 4, 5), np.uint8))
    content, message = UNFIT[kind][name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"^{tmp_path / name}:.*{message}"):
        Inputs.of_file(data[kind], tmp_path / name)
