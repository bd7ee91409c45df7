"""Readers of files of tables: CSV and Parquet."""

from __future__ import annotations

import warnings
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING

from fedsim.config.registry import nearest
from fedsim.data.sources import files
from fedsim.errors import DataError

if TYPE_CHECKING:
    import pandas as pd


def empty_table(path: Path) -> pd.DataFrame:
    """The columns of a Parquet file, without rows."""
    import pyarrow.parquet as pq

    with files.reading(path):
        frame: pd.DataFrame = pq.read_schema(path).empty_table().to_pandas()
    return frame


def read_table(path: Path, columns: Set[str] | None = None) -> pd.DataFrame:
    """A table, CSV with a header line or Parquet; of Parquet, all columns or some."""
    import pandas as pd

    if path.suffix not in (".csv", ".parquet"):
        raise DataError(f"{path}: is neither .csv nor .parquet")
    with files.reading(path), warnings.catch_warnings():
        # If rows are longer than the header, pandas drops the excess with a warning.
        warnings.simplefilter("error", pd.errors.ParserWarning)
        if path.suffix == ".csv":
            header = pd.read_csv(path, header=None, nrows=1, dtype=str).iloc[0]
            if (twice := header[header.duplicated()]).size:
                raise DataError(f"{path}: has two columns '{twice.iloc[0]}'")
            # Only blank cells are missing: "NA" can be a label.
            frame = pd.read_csv(
                path, index_col=False, keep_default_na=False, na_values=[""], low_memory=False
            )
        else:
            known = empty_table(path) if columns else pd.DataFrame()
            for name in columns or ():
                insist_on_column(path, known, name)
            frame = pd.read_parquet(path, columns=sorted(columns) if columns else None)
    if len(frame) == 0:
        raise DataError(f"{path}: has no rows")
    return frame


def insist_on_column(path: Path, frame: pd.DataFrame, name: str) -> None:
    """Refuse a table without a column of that name."""
    if name not in frame.columns:
        raise DataError(f"{path}: has no column '{name}'{nearest(name, map(str, frame.columns))}")
