"""Readers of files of tables: CSV and Parquet, one file or several as one table."""

from __future__ import annotations

import codecs
import glob
import io
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsim.config.registry import nearest
from fedsim.data.sources import files
from fedsim.errors import DataError, warn

if TYPE_CHECKING:
    import pandas as pd

TEXTS = (".csv", ".tsv")
FILE = "file"  # the column of several files as one table that names each row's file

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}
HEAD = 1 << 20  # bytes of a file whose lines tell the separator
LINES = 20  # of the head, the header line included
BLANK = [" " * count for count in range(9)]  # cells of a few spaces are blank as well
_QUOTED = re.compile(r'(?<![^,;\t\r\n])"[^"]*(?:""[^"]*)*"')
_DECIMAL_COMMA = re.compile(r"\s*[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?([eE][+-]?\d+)?\s*")
_GROUPED = re.compile(r"\s*[+-]?\d{1,3}(\.\d{3})*\s*")  # points between thousands
_THOUSANDS = re.compile(r"\s*[+-]?\d{1,3}(,\d{3})*\s*")


def read_tables(
    path: Path,
    change: Callable[[pd.DataFrame], pd.DataFrame] = lambda frame: frame,
    blanks: Set[str] = frozenset(),
) -> pd.DataFrame:
    """A table in a file, or in all files whose paths match a pattern such as `sites/*.csv`.

    Files of a pattern are read in order of their paths, and must have the same columns, in any
    order. The column `file`, in front, has the name of each row's file, without its endings, with
    its folder where several files have one name. The index has the path of each row's file, and
    the number of the row in it.

    Args:
        change: what is done to the table of each file, before they are compared.
        blanks: words among numbers; see `read_table`.

    Raises:
        DataError: no file matches; a file lacks a column that the first has, or has another one;
            a column is text in one file and numeric in another; two files have the same name.
    """
    import pandas as pd

    if not is_pattern(path):
        return change(read_table(path, blanks=blanks))
    paths = paths_of(path)
    if not paths:
        raise DataError(f"{path}: no file matches this pattern")
    frames = {found: change(read_table(found, blanks=blanks)) for found in paths}
    kinds: dict[str, tuple[str, Path]] = {}  # of each column, and the first file that shows it
    for found, frame in frames.items():
        _insist_on_columns(found, frame, paths[0], frames[paths[0]])
        for name, series in frame.items():
            kind = _kind(series)
            known, first = kinds.setdefault(str(name), (kind, found)) if kind else ("", found)
            if known != kind:
                raise DataError(
                    f"{found}: column '{name}' has {kind}, but {known} in {first}; make them alike"
                )
    whole = pd.concat(frames.values(), keys=frames.keys())
    names = np.repeat(_names(path, paths), [len(frame) for frame in frames.values()])
    whole.insert(0, FILE, pd.Series(names, index=whole.index, dtype="str"))
    return whole


def is_pattern(path: Path) -> bool:
    """Whether a path stands for several files."""
    return glob.has_magic(str(path.relative_to(_folder(path)))) and not path.exists()


def _folder(path: Path) -> Path:
    """The nearest folder above that exists, whose name may have the signs of patterns."""
    return next((above for above in path.parents if above.exists()), path.parent)


def paths_of(path: Path) -> list[Path]:
    """The files that a path, or a pattern, stands for."""
    if not is_pattern(path):
        return [path]
    folder = _folder(path)
    pattern = Path(glob.escape(str(folder))) / path.relative_to(folder)
    found = map(Path, sorted(glob.glob(str(pattern), recursive=True)))
    return [each for each in found if each.is_file() and files.is_visible(each.name)]


def _names(path: Path, paths: list[Path]) -> list[str]:
    """The names of several files as one table, all different."""
    names = [_stem(found) for found in paths]
    if len({*names}) < len(names):
        top = os.path.commonpath([found.parent for found in paths])
        names = [found.relative_to(top).with_name(_stem(found)).as_posix() for found in paths]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise DataError(
                f"{path}: {paths[names.index(name)]} and {paths[number]} have the same name; "
                "rename one of them"
            )
    return names


def is_table(path: Path) -> bool:
    """Whether a file is one of tables, by its name."""
    return _ending(path) in (*TEXTS, ".parquet")


def read_table(
    path: Path, columns: Set[str] | None = None, blanks: Set[str] = frozenset()
) -> pd.DataFrame:
    """A table in a `.csv`, `.tsv` or `.parquet` file; of Parquet, all columns or some.

    Text files begin with a header line, and may be compressed (`.gz`, `.xz`). The values of a
    `.csv` are separated by commas, semicolons or tabs. If not by commas, columns of numbers may
    have decimal commas; and if one has, points between thousands, with a warning where they might
    be decimal ones. Text that is not UTF-8 is read as cp1252,
    with a warning. Only blank cells are missing, as "NA" can be a label.

    Args:
        blanks: words that stand for blank cells, between numbers with decimal commas as well.

    Raises:
        DataError: the file cannot be read, or is no table; a column has no name, or the name of
            another one.
    """
    import pandas as pd

    if is_pattern(path):
        raise DataError(f"{path}: is a pattern; name one file here")
    ending = _ending(path)
    if ending == ".parquet":
        with files.reading(path):
            known = empty_table(path)
            _check_names(path, [str(name) for name in known.columns])
            for name in columns or ():
                insist_on_column(path, known, name)
            frame = pd.read_parquet(path, columns=sorted(columns) if columns else None)
            decimals = [n for n, s in frame.items() if pd.api.types.infer_dtype(s) == "decimal"]
            frame = frame.astype(dict.fromkeys(decimals, "float64"))
    elif ending in TEXTS:
        frame = _read_text(path, "\t" if ending == ".tsv" else "", blanks)
    else:
        inside = f"; name the files in it, such as {path / '*.csv'}" if path.is_dir() else ""
        raise DataError(f"{path}: is neither .csv, .tsv nor .parquet{inside}")
    if len(frame) == 0:
        raise DataError(f"{path}: has no rows")
    return frame


def empty_table(path: Path) -> pd.DataFrame:
    """The columns of a Parquet file, without rows."""
    import pyarrow.parquet as pq

    with files.reading(path):
        frame: pd.DataFrame = pq.read_schema(path).empty_table().to_pandas()
    return frame


def insist_on_column(path: Path, frame: pd.DataFrame, name: str) -> None:
    """Refuse a table without a column of that name."""
    if name not in frame.columns:
        raise DataError(f"{path}: has no column '{name}'{nearest(name, map(str, frame.columns))}")


def origin(path: Path, index: pd.Index[Any], row: int) -> tuple[Path, int]:
    """The file that a row of a table is from, by its index, and its number there from 0 on."""
    where = index[row]
    return where if isinstance(where, tuple) else (path, row)


def with_origin(path: Path, frame: pd.DataFrame) -> pd.DataFrame:
    """A table whose index has the path and the row of each row, so that some can be left out."""
    import pandas as pd

    if len(frame) and not isinstance(frame.index[0], tuple):
        frame.index = pd.MultiIndex.from_product([[path], range(len(frame))])
    return frame


def place(path: Path, row: int) -> str:
    """The place of a row in a file, for messages: its line of text, or its number from 1 on."""
    if _ending(path) not in TEXTS:
        return f"row {row + 1}"
    content = files.read_bytes(path)
    text = re.sub("\r\n?", "\n", content.decode(_encoding(content), errors="replace"))
    line, records = 1, 0
    for record in _QUOTED.sub(lambda cell: cell[0].replace("\n", "\0"), text).split("\n"):
        if record.strip(" "):  # pandas skips blank lines, too
            records += 1
        if records == row + 2:  # after the header line
            break
        line += 1 + record.count("\0")
    return f"line {line}"


def _ending(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in files.OPENERS and ".parquet" not in suffixes:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _stem(path: Path) -> str:
    packed = path.suffix.lower() in files.OPENERS
    return Path(path.stem).stem if packed else path.stem


def _read_text(path: Path, separator: str, blanks: Set[str]) -> pd.DataFrame:
    """A table in a text file, with that separator, or with the one that its lines tell."""
    import pandas as pd

    content = files.read_bytes(path)
    if not content.strip():
        raise DataError(f"{path}: is empty")
    encoding = _encoding(content)
    lines = _unquoted_lines(content, encoding)
    separator = separator or _separator(path, lines)
    doubtful: tuple[str, list[str]] = "", []
    with files.reading(path), warnings.catch_warnings():
        # If rows are longer than the header, pandas drops the excess with a warning.
        warnings.simplefilter("error", pd.errors.ParserWarning)

        def read(**keywords: Any) -> pd.DataFrame:
            keywords |= {"sep": separator, "encoding": encoding, "keep_default_na": False}
            return pd.read_csv(io.BytesIO(content), **keywords)

        header = read(header=None, nrows=1, dtype=str)
        names = header.iloc[0].tolist()
        _check_names(path, names)
        if len(names) == 1 and (other := _other_separator(lines)):
            known = "tabs" if separator == "\t" else "commas, semicolons or tabs"
            raise DataError(
                f"{path}: has one column, '{names[0]:.60}'; columns must be separated by "
                f"{known}, not by {other!r}"
            )

        rows: dict[str, Any] = {"index_col": False, "na_values": BLANK, "low_memory": False}
        frame = read(**rows)
        if separator != ",":
            doubtful = _undo_decimal_commas(
                frame, lambda names: read(**rows, usecols=names, dtype=str), blanks
            )
    if encoding in ("cp1252", "latin-1"):
        warn(
            f"{path}: is not UTF-8, and is read as {encoding}; look at its letters with accents, "
            "or save it as UTF-8"
        )
    how, names = doubtful
    if names:
        more = f" and {len(names) - 1} more" if names[1:] else ""
        warn(f"{path}: {how} in column '{names[0]}'{more}")
    return frame


def _encoding(content: bytes) -> str:
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    for encoding in ("utf-8", "cp1252"):  # pandas skips the mark of utf-8-sig itself
        try:
            content.decode(encoding)
        except UnicodeDecodeError:
            continue
        return encoding
    return "latin-1"


def _unquoted_lines(content: bytes, encoding: str) -> list[str]:
    """The first lines of a table that are not blank, the header line in front, without quotes."""
    head = content[:HEAD].decode(encoding, errors="ignore").removeprefix("\ufeff")
    head = _QUOTED.sub("", head)
    lines = [line for line in re.split(r"[\r\n]+", head) if line.strip(" ")]
    return lines[:LINES] if len(content) <= HEAD else (lines[:-1] or lines)[:LINES]


def _separator(path: Path, lines: list[str]) -> str:
    """What separates columns: what every line has as often as the header line, most of all.

    If lines differ in all separators, it is the one that the header line has most.
    """
    counts = [Counter(line) for line in lines] or [Counter()]
    there = {sign: counts[0][sign] for sign in SEPARATORS if counts[0][sign]}
    regular = {
        sign: count for sign, count in there.items() if all(each[sign] == count for each in counts)
    }
    choice = regular or there
    most = [sign for sign, count in choice.items() if count == max(choice.values())]
    if len(most) > 1:
        signs = " or ".join(SEPARATORS[sign] for sign in most)
        raise DataError(
            f"{path}: its columns may be separated by {signs}; put names with such a sign in "
            "double quotes"
        )
    return most[0] if most else ","


def _other_separator(lines: list[str]) -> str:
    """A sign that is no separator, which every line has as often as the header line."""
    for sign in "|:,; ":
        counts = {line.strip().count(sign) for line in lines}
        if len(counts) == 1 and counts != {0}:
            return sign
    return ""


def _check_names(path: Path, names: list[str]) -> None:
    for number, name in enumerate(names, 1):
        if not name.strip():
            raise DataError(
                f"{path}: column {number} has no name; give it one, or leave it out (pandas' "
                "to_csv(index=False))"
            )
        if names.index(name) < number - 1:
            raise DataError(f"{path}: has two columns '{name}'")


def _undo_decimal_commas(
    frame: pd.DataFrame, as_written: Callable[[list[str]], pd.DataFrame], blanks: Set[str]
) -> tuple[str, list[str]]:
    """Make numbers of texts that are numbers with decimal commas or several points.

    If there are any, points of other columns are between thousands if all of them can be.

    Args:
        blanks: words that may be among numbers, and stay.

    Returns:
        How other signs were read that can be read in two ways, and the columns with such.
    """

    def number(written: pd.Series[Any]) -> pd.Series[Any]:
        plain, words = written.str.replace(".", "").str.replace(",", "."), written.isin(blanks)
        found = plain.mask(words).astype("float64")
        if words.any():
            found = found.astype(object).where(~words, written)
        return found.reindex(frame.index)

    texts = {str(name): s.dropna() for name, s in frame.items() if s.dtype.kind == "O"}
    commas, certain = list[str](), False
    for name, written in texts.items():
        cells = [cell for cell in written if cell not in blanks]
        fits = all(isinstance(cell, str) and _DECIMAL_COMMA.fullmatch(cell) for cell in cells)
        if fits and any("," in cell or cell.count(".") > 1 for cell in cells):
            frame[name] = number(written)
            certain |= not all(map(_THOUSANDS.fullmatch, cells))
            commas.append(name)
    others = [str(name) for name, s in frame.items() if s.dtype.kind == "f" and name not in texts]
    if commas and not certain:
        return "commas are read as decimal ones, not as those between thousands,", commas
    grouped = []
    for column, written in as_written(others).items() if commas and others else ():
        known = written.dropna()
        if any("." in cell for cell in known) and all(map(_GROUPED.fullmatch, known)):
            frame[column] = number(known)
            grouped.append(str(column))
    return "points are read as those between thousands, as others have decimal commas,", grouped


def _insist_on_columns(path: Path, frame: pd.DataFrame, first: Path, known: pd.DataFrame) -> None:
    if FILE in frame:
        raise DataError(
            f"{path}: has a column '{FILE}', which several files as one table are given; rename it"
        )
    for name in (*known.columns, *frame.columns):
        if name not in frame:
            raise DataError(f"{path}: has no column '{name}', which {first} has")
        if name not in known:
            raise DataError(f"{path}: has a column '{name}', which {first} has not")


def _kind(series: pd.Series[Any]) -> str:
    """What a column holds, in words; empty if all of it is blank."""
    import pandas as pd

    values = series.dropna()
    if isinstance(values.dtype, pd.CategoricalDtype):
        values = values.astype(values.dtype.categories.dtype)
    if not len(values):
        return ""
    if pd.api.types.is_bool_dtype(values) or pd.api.types.infer_dtype(values) == "boolean":
        return "true and false"
    if pd.api.types.is_numeric_dtype(values):
        return "numbers"
    return "dates" if pd.api.types.is_datetime64_any_dtype(values) else "text"
