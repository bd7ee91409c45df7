"""Folders, labels and texts as they come, with what programs leave beside them."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from other_data import Items
from PIL import Image

import fedsim
from fedsim.data import Dataset, load_dataset
from fedsim.data.sources.adapters import Reading, read
from fedsim.data.sources.arrays import Npz
from fedsim.data.sources.images import Folder
from fedsim.data.sources.tables import Table
from fedsim.data.sources.text import Shakespeare, Text
from fedsim.errors import DataError, FedsimWarning
from fedsim.explain.inputs import Inputs
from fedsim.objectives.classification import Classification

RNG = np.random.default_rng(0)


def paint(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        Image.fromarray(RNG.integers(0, 256, (4, 4), dtype=np.uint8)).save(folder / name)


LEFT = (
    *(".ipynb_checkpoints", "__MACOSX", "@eaDir", ".git", ".empty", "__pycache__", "lost+found"),
    *("$RECYCLE.BIN", "System Volume Information", "#recycle", "@Recycle"),
)


@pytest.mark.parametrize("parts", [("",), ("train", "test")])
def test_folders_of_programs_are_no_classes(tmp_path: Path, parts: tuple[str, ...]) -> None:
    for part in parts:
        for name in ("cat", "dog"):
            paint(tmp_path / part / name, *(f"{i}.png" for i in range(5)), "._0.png")
            (tmp_path / part / name / "Thumbs.db").write_bytes(b"of Windows")
        for left in LEFT:
            paint(tmp_path / part / "cat" / left, "0-checkpoint.png")
            paint(tmp_path / part / left, "0.png", "1.png", "2.png", "3.png")
        (tmp_path / part / ".DS_Store").write_bytes(b"of a Mac")
    with pytest.warns(FedsimWarning) as caught:
        data = load_dataset(Folder(path=tmp_path, size=4))
    assert data.classes == ("cat", "dog")
    assert len(data.y) + len(data.test_y) == 10 * len(parts)
    names = ", ".join(sorted([*LEFT, "._0.png", ".DS_Store", "Thumbs.db"]))
    assert [str(each.message) for each in caught] == [
        f"{tmp_path / part}: 27 hidden or system items ignored: {names}" for part in parts
    ]
    found = Inputs.of_file(data, tmp_path / parts[-1] / "cat")
    assert found.names == tuple(f"{i}.png" for i in range(5))
    assert found.notes[0].startswith("cat: 13 hidden or system items ignored: #recycle, ")


@pytest.mark.parametrize("place", ["cat/it.heic", "cat/notes.txt", "dog/more/it.pdf", "it.png"])
def test_files_that_are_left_out_are_named(tmp_path: Path, place: str) -> None:
    for name in ("cat", "dog"):
        paint(tmp_path / name / "more", *(f"{i}.png" for i in range(5)))
    paint(tmp_path, "it.png") if place == "it.png" else (tmp_path / place).write_bytes(b"other")
    with pytest.warns(FedsimWarning) as caught:
        Folder(path=tmp_path, size=4).load()
    (warned,) = caught
    assert str(warned.message) == (
        f"{tmp_path}: 1 file left out, such as {place}: pictures are .bmp, .dcm, .gif, .jpeg, "
        ".jpg, .pgm, .png, .ppm, .tif, .tiff, .webp files in a folder of their class"
    )


def test_arrays_and_texts_beside_what_programs_leave(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", RNG.random((10, 2)))
    np.save(tmp_path / "y.npy", np.arange(10) % 2)
    (tmp_path / "._x.npy").write_bytes(b"of a Mac")
    assert Npz(path=tmp_path).load().columns == {}
    leaf = '{"users": ["u"], "user_data": {"u": {"x": ["%s"], "y": ["b"]}}}' % ("a" * 80)
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "all.json").write_text(leaf)
        (tmp_path / part / "._all.json").write_bytes(b"of a Mac")
    assert len(Shakespeare(root=tmp_path).load().y) == 1


def written(path: Path, labels: Sequence[str], source: str) -> Dataset:
    """Labels of a table, of a table of texts, or of lines of texts, four times each."""
    rows = [(label, f"word{k}") for k, label in enumerate([*labels] * 4)]
    if source == "lines":
        path = path.with_suffix(".tsv")
        path.write_text("".join(f"{label}\t{word}\n" for label, word in rows))
        return Text(path=path, test_fraction=0.5).load()
    frame = pd.DataFrame(rows, columns=["label", "text"])
    if source == "texts":
        path = path.with_suffix(".csv")
        frame.to_csv(path, index=False)
        return Text(path=path, test_fraction=0.5).load()
    frame["x"] = np.arange(len(frame)) % 3
    path = path.with_suffix(f".{source}")
    frame.to_csv(path, index=False) if source == "csv" else frame.to_parquet(path)
    return Table(path=path, label="label", features=("x",), test_fraction=0.5).load()


SOURCES = ["csv", "parquet", "texts", "lines"]
NAMED_LIKE_NOTHING = ["NA", "N/A", "NaN", "nan", "None", "null", "na"]


@pytest.mark.filterwarnings("ignore:.*words get random vectors")
@pytest.mark.parametrize("source", SOURCES)
def test_a_label_is_what_it_says(tmp_path: Path, source: str) -> None:
    """NA is Namibia, or noradrenaline, among other words."""
    names = ["DE", *NAMED_LIKE_NOTHING, "<NA>", "-", "#N/A", "n. a.", "AT"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="data: .*differ only in case")
        assert written(tmp_path / "it", names, source).classes == tuple(sorted(names))


@pytest.mark.filterwarnings("ignore:.*words get random vectors")
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("others", [["0", "1"], ["1.5", "-2"], ["True", "False"]])
def test_a_missing_label_among_numbers(tmp_path: Path, source: str, others: list[str]) -> None:
    place = "line" if source == "lines" else "row"
    for word in NAMED_LIKE_NOTHING:
        message = f"has '{word}' in {place} 3, and numbers in others; fill or drop it"
        with pytest.raises(DataError, match=f"^{tmp_path}/it.*label.* {message}$"):
            written(tmp_path / "it", [*others, word], source)


LABELS = np.array([0, 3, 9] * 10)


def arrays(**more: Any) -> dict[str, Any]:
    return {"x": RNG.random((30, 2)).astype(np.float32), "y": LABELS, **more}


def as_npz(**given: Any) -> Dataset:
    stream = io.BytesIO()
    np.savez(stream, **given)
    path = Path(given.pop("path", "it.npz"))
    path.write_bytes(stream.getvalue())
    return Npz(path=path).load()


def in_parts(data: dict[str, Any]) -> dict[str, Any]:
    first, last = {k: v[:21] for k, v in data.items()}, {k: v[21:] for k, v in data.items()}
    return {f"{k}_train": v for k, v in first.items()} | {f"{k}_test": v for k, v in last.items()}


def of_torch(parts: int) -> Dataset:
    class Plain(Items):
        classes = ()  # type: ignore[assignment]

    items = [*zip(arrays()["x"], LABELS.tolist(), strict=True)]
    cut = (Plain(items[:21]), Plain(items[21:]))
    found = read(cut if parts == 2 else Plain(items), "data", Reading())
    assert found is not None
    return found


@pytest.mark.parametrize(
    "load",
    [
        lambda: as_npz(**arrays()),
        lambda: as_npz(**in_parts(arrays())),
        lambda: fedsim.Dataset.of(**arrays()),
        lambda: fedsim.Dataset.of(
            arrays()["x"], LABELS, arrays()["x"][:9], LABELS[:9].astype(np.uint8)
        ),
        lambda: of_torch(1),
        lambda: of_torch(2),
    ],
    ids=["npz", "npz in parts", "of", "of parts", "torch", "torch in parts"],
)
def test_classes_are_those_that_occur(tmp_path: Path, monkeypatch: Any, load: Any) -> None:
    monkeypatch.chdir(tmp_path)
    data = load()
    assert data.classes == ("0", "3", "9")
    assert {*data.y.tolist()} == {*data.test_y.tolist()} == {0, 1, 2}
    weights = Classification(class_weights="balanced").fitted(data).class_weights
    assert weights == pytest.approx((1, 1, 1), abs=0.1)


def test_balanced_weights_average_one_where_classes_are_absent() -> None:
    y = np.array([0, 0, 0, 3, 9, 9])
    x = np.zeros((6, 1), np.float32)
    data = Dataset(x, y, x, y, tuple("0123456789"))
    weights = Classification(class_weights="balanced").fitted(data).class_weights
    assert isinstance(weights, tuple)
    assert np.array(weights)[y].mean() == pytest.approx(1)
    assert weights[3] == 3 * weights[0]


ALIKE = "differ only in case, spaces or the form of th"


@pytest.mark.parametrize(
    ("classes", "y", "test_y", "message"),
    [
        (("Cat", "cat", "dog"), [0, 1, 2], [0, 1, 2], f"'Cat', 'cat' {ALIKE}"),
        (("cat", "cat ", "dog"), [0, 1, 2], [0], f"'cat', 'cat ' {ALIKE}"),
        (("café", "cafe\u0301"), [0, 1], [0, 1], ALIKE),
        (("a b", "a  b", "A B"), [0, 1, 2], [0], f"'a b', 'a  b', 'A B' {ALIKE}"),
        (("x", "y", "z"), [0, 2, 2], [0, 1], "1 of 3 classes occur in the test set only and cann"),
        (("a", "A"), [0, 1], [0, 1], ""),
        (("10", "1"), [0, 1], [0, 1], ""),
    ],
)
def test_doubtful_classes(
    classes: tuple[str, ...], y: list[int], test_y: list[int], message: str
) -> None:
    def x(labels: list[int]) -> Any:
        return RNG.random((len(labels), 2)).astype(np.float32)

    given = Dataset(x(y), np.array(y), x(test_y), np.array(test_y), classes)
    found = warned_of(given)
    assert len(found) == (1 if message else 0)
    assert all(re.match(rf"^data: .*{message}", each) for each in found)


def warned_of(data: Dataset) -> list[str]:
    class Own(fedsim.data.Source):
        name: str = "own"

        def load(self) -> Dataset:
            return data

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_dataset(Own())
    return [str(each.message) for each in caught]


def test_equal_inputs() -> None:
    x, y = np.full((20, 1, 2, 2), 255, np.uint8), np.arange(20) % 2
    assert warned_of(Dataset(x, y, x, y, ("a", "b"))) == [
        "data: the first 20 training inputs are all equal"
    ]


@pytest.mark.filterwarnings("ignore:.*words get random vectors")
def test_a_text_in_chinese(tmp_path: Path) -> None:
    """All of its words have one character each, yet it is not a text of characters."""
    path = tmp_path / "it.tsv"
    path.write_text("好\t很好，喜欢\n差\t很差。\n" * 2)
    data = Text(path=path, test_path=path).load()
    assert sorted(data.words[2:]) == sorted("很好喜欢差")
    found = Inputs.of_texts(data, ["“很 好”，喜欢！"], ["it"])
    assert found.words == (("很", "好", "喜", "欢"),)
    assert found.notes == ()
