"""Files of tables in the forms that people have them in."""

from __future__ import annotations

import gzip
import lzma
import warnings
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import examples
from fedsim.data import load_dataset, partitions
from fedsim.data.sources.table_files import place, read_table, read_tables
from fedsim.data.sources.tables import Table
from fedsim.errors import DataError, FedsimWarning

PATIENTS = pd.DataFrame(
    {"age": [63, 41, 57], "dose": [0.5, None, 1250.25], "town": ["Bern", "Kiel, Nord", "NA"]}
)
COMMAS = PATIENTS.to_csv(index=False)
SEMICOLONS = PATIENTS.to_csv(index=False, sep=";", decimal=",")
THOUSANDS = SEMICOLONS.replace("1250,25", "1.250,25")
TABS = PATIENTS.to_csv(index=False, sep="\t")


def parquet(path: Path) -> None:
    PATIENTS.to_parquet(path)


FILES: dict[str, bytes | Callable[[Path], None]] = {
    "a.csv": COMMAS.encode(),
    "A.CSV": COMMAS.encode("utf-8-sig"),
    "a.b.csv.gz": gzip.compress(COMMAS.encode()),
    "A.CSV.GZ": gzip.compress(SEMICOLONS.encode()),
    "a.csv.xz": lzma.compress(TABS.encode()),
    "a.tsv": TABS.encode(),
    "decimal.TSV": PATIENTS.to_csv(index=False, sep="\t", decimal=",").encode(),
    "windows.csv": SEMICOLONS.replace("\n", "\r\n").encode("utf-8-sig"),
    "old_mac.csv": SEMICOLONS.replace("\n", "\r").encode(),
    "thousands.csv": THOUSANDS.encode(),
    "excel.csv": THOUSANDS.encode("utf-16"),
    "blank_lines.csv": COMMAS.replace("\n", "\n\n").encode(),
    "spaces.csv": COMMAS.replace(",,", ",  ,").encode(),
    "quoted.csv": b'"age";"dose";"town"\n"63";"0,5";"Bern"\n41;;"Kiel, Nord"\n57;1250,25;NA\n',
    "a.parquet": parquet,
    "A.Parquet": parquet,
}


@pytest.mark.parametrize("name", FILES)
def test_a_table_is_the_same_in_every_form(tmp_path: Path, name: str) -> None:
    path, content = tmp_path / name, FILES[name]
    content(path) if callable(content) else path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pd.testing.assert_frame_equal(read_table(path), PATIENTS)


def written(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize(
    ("encoding", "said"), [("latin-1", "cp1252"), ("cp1252", "cp1252"), ("utf-8", "")]
)
def test_letters_with_accents(tmp_path: Path, encoding: str, said: str) -> None:
    path = written(tmp_path / "a.csv", "größe;y\n1,5;münchen\n2;köln\n", encoding)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        table = read_table(path)
    assert table.to_dict("list") == {"größe": [1.5, 2.0], "y": ["münchen", "köln"]}
    assert [str(each.message) for each in caught] == [
        f"{path}: is not UTF-8, and is read as {said}; look at its letters with accents, or save "
        "it as UTF-8"
    ] * bool(said)


def test_bytes_that_only_latin_1_has(tmp_path: Path) -> None:
    with pytest.warns(FedsimWarning, match="is read as latin-1"):
        table = read_table(written(tmp_path / "a.csv", "x,y\n1,\x81\n", "latin-1"))
    assert table["y"].tolist() == ["\x81"]


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("a;b\n1,5;2,5\n", ["a", "b"]),
        ("a;b, in kg;c, in m\n1;2;3\n", ["a", "b, in kg", "c, in m"]),
        ("a;b, in kg\n1;2\n", ["a", "b, in kg"]),
        ("a,b;c,d\n1,2,3\n", ["a", "b;c", "d"]),
        ('a,"b;c;d"\n1,2\n', ["a", "b;c;d"]),
        ("a\tb, c\n1\t2\n", ["a", "b, c"]),
        ("a,b,c\n1,2\n1,2,3\n", ["a", "b", "c"]),  # a short row
        ("x\n1\n2\n", ["x"]),
        ("body mass\n1\n2\n", ["body mass"]),
    ],
)
def test_what_separates_columns(tmp_path: Path, text: str, columns: list[str]) -> None:
    assert read_table(written(tmp_path / "a.csv", text)).columns.tolist() == columns


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        (["1,5", "", "-2"], [1.5, np.nan, -2.0]),
        (["1.234,5", "999", "1,5e-3"], [1234.5, 999.0, 0.0015]),
        (["1.234.567", "0,1"], [1234567.0, 0.1]),
        (["1.5", "2"], [1.5, 2.0]),
        (["1.5", "2,5"], ["1.5", "2,5"]),  # which is it?
        (["12.34,5", "1,0"], ["12.34,5", "1,0"]),
        (["1,5", "much"], ["1,5", "much"]),
        (["True", "", "False"], [True, np.nan, False]),
    ],
)
def test_decimal_commas(tmp_path: Path, cells: list[str], found: list[Any]) -> None:
    lines = "".join(f"{cell};a\n" for cell in cells)
    table = read_table(written(tmp_path / "a.csv", f"x;y\n{lines}"))
    pd.testing.assert_series_equal(table["x"], pd.Series(found, name="x"))
    quoted = "".join(f'"{cell}",a\n' for cell in cells)
    table = read_table(written(tmp_path / "b.csv", f"x,y\n{quoted}"))
    assert (table["x"].dtype.kind == "f") == (
        not any("," in cell or "T" in cell for cell in cells)
    )


@pytest.mark.parametrize(
    ("row", "found", "doubtful"),
    [
        ("1,5;5.560;2.117.000;1.25", [1.5, 5560, 2117000, 1.25], "y"),
        ("1,5;5.560;3.14;1.25", [1.5, 5560, 3.14, 1.25], "y"),
        ("1;5.560;2.117.000;7", [1, 5560, 2117000, 7], "y"),
        ("1;5.560;3.14;7", [1, 5.56, 3.14, 7], ""),  # no column has decimal commas
    ],
)
def test_points_between_thousands(
    tmp_path: Path, row: str, found: list[float], doubtful: str
) -> None:
    path = written(tmp_path / "a.csv", f"x;y;z;w\n{row}\n{row}\n")
    with warnings.catch_warnings(record=True) as caught:
        assert read_table(path).iloc[1].tolist() == found
    told = f"thousands, as others have decimal commas, in column '{doubtful}'"
    assert [told in str(warning.message) for warning in caught] == [True] * bool(doubtful)


def test_commas_that_may_be_between_thousands(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "x;y\n1,005;a\n2,500;b\n")
    with pytest.warns(
        FedsimWarning, match="commas are read as decimal ones, not as .* column 'x'"
    ):
        assert read_table(path)["x"].tolist() == [1.005, 2.5]


def test_files_of_one_name_are_named_with_their_folders(tmp_path: Path) -> None:
    top = tmp_path / "sites [1]"
    for folder in ("a", "b"):
        (top / folder).mkdir(parents=True)
        written(top / folder / "data.csv", COMMAS)
    assert read_tables(top / "*" / "data.csv")["file"].unique().tolist() == ["a/data", "b/data"]


def test_decimals_of_parquet_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pd.DataFrame({"x": [Decimal("1.5"), None]}).to_parquet(path)
    np.testing.assert_array_equal(read_table(path)["x"], [1.5, np.nan])


CELL = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=5)


@given(rows=st.lists(st.tuples(CELL, CELL), min_size=1, max_size=8), sign=st.sampled_from(",;\t"))
@examples(60)
def test_any_words_come_back_and_their_lines_are_known(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], sign: str
) -> None:
    path = tmp_path_factory.mktemp("words") / "a.csv"
    table = pd.DataFrame(rows, columns=["first", "second"]).assign(x="+", number=range(len(rows)))
    table.to_csv(path, index=False, sep=sign, quoting=1)
    found = read_table(path)
    assert found["number"].tolist() == table["number"].tolist()
    text = path.read_bytes().decode()
    for row, (first, second) in enumerate(rows):
        for name, word in (("first", first), ("second", second)):
            # Blanks are missing, and columns of numbers are numbers.
            if not (blank := pd.isna(found[name][row])) and found[name].dtype.kind == "O":
                assert found[name][row] == word or isinstance(found[name][row], bool)
            assert not blank or not word.strip(" ")
        line = int(place(path, row).removeprefix("line "))
        before = "\n".join(text.split("\n")[: line - 1])
        assert before.count('"') % 2 == 0
        assert text.split("\n")[line - 1].startswith(
            f'"{first}'.replace("\n", "\0").split("\0")[0][:1]
        )


def sites(folder: Path, **tables: pd.DataFrame) -> Path:
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False)
    return folder / "*.csv"


def test_several_files_are_one_table(tmp_path: Path) -> None:
    kiel = pd.DataFrame({"age": [1, 2], "thal": [3.0, None], "y": ["b", "a"]})
    bern = pd.DataFrame({"y": ["a", "b"], "thal": [None, None], "age": [3, 4]})
    path = sites(tmp_path, kiel=kiel, bern=bern)
    (tmp_path / "._bern.csv").write_bytes(b"of a Mac")
    table = read_tables(path)
    assert table.to_dict("list") == {
        "file": ["bern", "bern", "kiel", "kiel"],
        "y": ["a", "b", "b", "a"],
        "thal": pytest.approx([np.nan, np.nan, 3, np.nan], nan_ok=True),
        "age": [3, 4, 1, 2],
    }
    assert table.index[2] == (tmp_path / "kiel.csv", 0)


def test_files_are_clients_with_one_line(tmp_path: Path) -> None:
    rows = pd.DataFrame({"x": np.arange(12.0), "y": [0, 1, 3] * 4})
    path = sites(tmp_path, **{"2019": rows, "2020": rows + 100, "2021": rows})
    data = load_dataset(Table(path=path, label="y", test_fraction=0.25))
    assert (data.features, data.classes) == (("x",), ("0", "1", "3", "100", "101", "103"))
    splits = partitions.parse({"kind": "natural", "column": "file"}).deal(data, 0)
    assert splits.names == ("file 2019", "file 2020", "file 2021")
    assert set(data.x[splits.train[1], 0] >= 100) == {True}


def test_a_file_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    path = written(tmp_path / "a[1].csv", COMMAS)
    pd.testing.assert_frame_equal(read_tables(path), PATIENTS)


def labels_of(path: Path, train: Mapping[str, Any], test: Mapping[str, Any] | None = None) -> Any:
    """A data set of these labels, four times each, in files of that type."""
    for file, labels in ((path, train), (path.with_stem("test"), test)):
        if labels is not None:
            values = np.array([*labels] * 4, object if path.suffix == ".csv" else None)
            table = pd.DataFrame({"x": np.arange(len(values)), "y": values})
            table.to_csv(file, index=False) if path.suffix == ".csv" else table.to_parquet(file)
    test_path = None if test is None else path.with_stem("test")
    return load_dataset(Table(path=path, label="y", test_path=test_path, test_fraction=0.25))


ALL = (".csv", ".parquet")


@pytest.mark.parametrize(
    ("labels", "classes", "endings"),
    [
        (["10", "9", "1"], ("1", "9", "10"), ALL),  # numbers with gaps
        ([3, 1, 2], ("1", "2", "3"), ALL),
        ([-1, 1], ("-1", "1"), ALL),
        ([2.0, 1.0, 7.0], ("1", "2", "7"), ALL),  # as tables with a blank have integers
        ([0.5, 1.0, -2.0], ("-2.0", "0.5", "1.0"), ALL),
        (["NA", "None", "nan", "DE"], ("DE", "NA", "None", "nan"), ALL),
        (["10", "9", "old"], ("10", "9", "old"), ALL),
        (["b", "B", "a b", "ä"], ("B", "a b", "b", "ä"), ALL),
        (["01", "1", "2"], ("01", "1", "2"), (".parquet",)),
        ([True, False], ("False", "True"), ALL),
        ([2**60 + 1, 2**60], (str(2**60), str(2**60 + 1)), ALL),
    ],
)
def test_classes_are_the_labels_in_order(
    tmp_path: Path, labels: list[Any], classes: tuple[str, ...], endings: tuple[str, ...]
) -> None:
    for ending in endings:
        data = labels_of(tmp_path / f"a{ending}", labels)
        assert data.classes == classes
        names = [classes[c] for c in data.y]
        same = {
            str(label): {str(label), f"{label:g}"} if isinstance(label, float) else {str(label)}
            for label in labels
        }
        for x, name in zip(data.x[:, 0].astype(int), names, strict=True):
            assert name in same[str(labels[x % len(labels)])]


@pytest.mark.parametrize(
    ("train", "test", "classes"),
    [
        ([1, 2, 3], [2.0, 1.0], ("1", "2", "3")),
        ([1, 2, "x"], [2, 1], ("1", "2", "x")),
        ([2, 1], [1, 2, "x"], ("1", "2", "x")),
        ([1, 2], [0.5, 1], ("0.5", "1.0", "2.0")),
        ([True, False], [0, 1], None),
        ([1, 2], ["a", "b"], None),
    ],
)
@pytest.mark.filterwarnings("ignore:data. 1 of 3 classes occur in the test set only")
def test_labels_of_a_test_file(
    tmp_path: Path, train: list[Any], test: list[Any], classes: tuple[str, ...] | None
) -> None:
    if classes is None:
        with pytest.raises(DataError, match=r"/test\.csv: label column 'y' is .*, but .* in /"):
            labels_of(tmp_path / "a.csv", train, test)
        return
    assert labels_of(tmp_path / "a.csv", train, test).classes == classes
