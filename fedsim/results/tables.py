"""Tidy tables that grow round by round, as Parquet."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from fedsim import atomic
from fedsim.errors import RunError

if TYPE_CHECKING:
    import pandas as pd


class Table:
    """A table of a run: rows are added round by round and land on disk in parts.

    While the run goes on its parts lie in `<name>.parts/`, each named by the round that it ends
    with; `finish` merges them into `<name>.parquet`. So memory stays flat, a part is never half
    written, and a run that falls back to a checkpoint drops the parts after it.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._file = folder / f"{name}.parquet"
        self._parts = folder / f"{name}.parts"
        self._rows: list[Mapping[str, Any]] = []

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows; they may differ in their columns."""
        self._rows.extend(rows)

    def flush(self, t: int) -> None:
        """Write the rows added since the last time as the part that ends with round t."""
        if not self._rows:
            return
        columns = list(dict.fromkeys(key for row in self._rows for key in row))
        with self._one_type_a_column():
            table = pa.table({c: [row.get(c) for row in self._rows] for c in columns})
        self._parts.mkdir(exist_ok=True)
        _write(self._parts / f"{t:06d}.parquet", [table], table.schema)
        self._rows = []

    def rewind(self, t: int) -> None:
        """Forget all rows of rounds after t. Valid for rounds at which parts end."""
        self._rows = []
        for part in self._part_files():
            if int(part.stem) > t:
                part.unlink()

    def finish(self) -> None:
        """Merge the parts into one file."""
        shutil.rmtree(self._parts.with_name(f".{self._parts.name}.merged"), ignore_errors=True)
        parts = self._part_files()
        if not parts:
            return
        with self._one_type_a_column():
            schemas = [pq.read_schema(part) for part in parts]
            schema = pa.unify_schemas(schemas, promote_options="permissive")
        _write(self._file, (_fit(pq.read_table(p), schema) for p in parts), schema)
        # All at once, so that a crash never leaves some of the parts to be merged again.
        merged = self._parts.with_name(f".{self._parts.name}.merged")
        self._parts.rename(merged)
        shutil.rmtree(merged)

    def read(self) -> pd.DataFrame:
        """All rows on disk."""
        import pandas as pd  # here, because client actors import this module and need no pandas

        if self._file.exists():
            return pd.read_parquet(self._file)
        parts = self._part_files()
        if not parts:
            return pd.DataFrame()
        tables = [pq.read_table(part) for part in parts]
        whole: pd.DataFrame = pa.concat_tables(tables, promote_options="permissive").to_pandas()
        return whole

    @contextmanager
    def _one_type_a_column(self) -> Iterator[None]:
        try:
            yield
        except pa.ArrowException as error:
            raise RunError(f"{self._file.name}: a column mixes types: {error}") from error

    def _part_files(self) -> list[Path]:
        return sorted(self._parts.glob("[0-9]*.parquet"))


def _fit(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with the columns of `schema`, empty where it has none."""
    return pa.concat_tables([schema.empty_table(), table], promote_options="permissive").select(
        schema.names
    )


def _write(path: Path, tables: Iterable[pa.Table], schema: pa.Schema) -> None:
    """Write tables of one schema to a file."""
    with atomic.replacing(path) as aside, pq.ParquetWriter(aside, schema) as writer:
        for table in tables:
            writer.write_table(table)
