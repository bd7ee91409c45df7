"""Tidy tables that grow round by round, as Parquet."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, Field, ValidationError

from fedsim.errors import Damaged, RunError
from fedsim.support import atomic

if TYPE_CHECKING:
    import pandas as pd

_BEFORE = b"fedsim.chain"  # key of a part's metadata


class Table:
    """A table of a run: rows are added round by round and land on disk in parts.

    While the run goes on its parts lie in `<name>.parts/`, each named by the round that it ends
    with; `merge` makes `<name>.parquet` of them. So memory stays flat, a part is never half
    written, and a run that falls back to a checkpoint drops the parts after it.

    Attributes:
        file: `<name>.parquet`.
        chain: a hash of all parts. Each part holds that of those before it, so that the one that
            is damaged or missing can be named.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.file = folder / f"{name}.parquet"
        self._parts = folder / f"{name}.parts"
        self._rows: list[Mapping[str, Any]] = []
        self.chain = ""

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows.extend(rows)

    def flush(self, t: int) -> None:
        """Write the rows added since the last time as the part that ends with round t."""
        if not self._rows:
            return
        columns = list(dict.fromkeys(key for row in self._rows for key in row))
        with self._one_type_a_column():
            table = pa.table({c: [row.get(c) for row in self._rows] for c in columns})
        self.write_part(table, t)
        self._rows = []

    def write_part(self, table: pa.Table, t: int) -> None:
        self._parts.mkdir(exist_ok=True)
        part = self._parts / f"{t:06d}.parquet"
        _write(part, [table], table.schema.with_metadata({_BEFORE: self.chain}))
        self.chain = _chained(self.chain, part)

    def check(self, t: int, chain: str) -> None:
        """Insist that the parts up to round t are those that had this chain."""
        found, latest = "", None
        for part in self._part_files():
            if int(part.stem) > t:
                break
            try:
                before = (pq.read_schema(part).metadata or {}).get(_BEFORE, b"").decode()
            except (OSError, ValueError, pa.ArrowException) as error:
                raise Damaged(f"{part}: is damaged: {error}") from error
            if before != found:
                raise Damaged(
                    f"{latest or part}: is damaged, or a part before or after it is gone"
                )
            found, latest = _chained(found, part), part
        if found != chain:
            last = self._parts / f"{t:06d}.parquet"
            wrong = f"{last}: is missing" if latest != last else f"{last}: is damaged"
            raise Damaged(f"{wrong}, or a part before it is")

    def rewind(self, t: int, chain: str) -> None:
        """Forget all rows of rounds after t. Valid for rounds at which parts end."""
        self._rows, self.chain = [], chain
        self.file.unlink(missing_ok=True)
        for part in self._part_files():
            if int(part.stem) > t:
                part.unlink()

    def merge(self) -> None:
        parts = self._part_files()
        if not parts:
            return
        with self._one_type_a_column():
            schemas = [pq.read_schema(part).remove_metadata() for part in parts]
            schema = pa.unify_schemas(schemas, promote_options="permissive")
        # With all columns, empty where a part lacks one.
        parted = ([schema.empty_table(), _read(part)] for part in parts)
        whole = (pa.concat_tables(pair, promote_options="permissive") for pair in parted)
        _write(self.file, (table.select(schema.names) for table in whole), schema)

    def drop_parts(self) -> None:
        # All at once, so that a crash never leaves some of the parts to be merged again.
        merged = self._parts.with_name(f".{self._parts.name}.merged")
        shutil.rmtree(merged, ignore_errors=True)
        if self._parts.exists():
            self._parts.rename(merged)
            shutil.rmtree(merged)

    def read(self, checksum: str | None = None) -> pd.DataFrame:
        """All rows on disk; raises Damaged if they cannot be read or have another checksum."""
        import pandas as pd  # here, because client actors import this module and need no pandas

        try:
            atomic.check(self.file, checksum)
            if self.file.exists():
                return pd.read_parquet(self.file)
            tables = [_read(part) for part in self._part_files()]
            if not tables:
                return pd.DataFrame()
            whole = pa.concat_tables(tables, promote_options="permissive")
            return cast("pd.DataFrame", whole.to_pandas())
        except (OSError, ValueError, pa.ArrowException) as error:
            raise Damaged(f"{self.file}: is damaged: {error}") from error

    @contextmanager
    def _one_type_a_column(self) -> Iterator[None]:
        try:
            yield
        except pa.ArrowException as error:
            raise RunError(f"{self.file.name}: a column mixes types: {error}") from error

    def _part_files(self) -> list[Path]:
        return sorted(self._parts.glob("[0-9]*.parquet"))


class _Ledger(BaseModel):
    total_bytes_up: int = Field(ge=0)
    total_bytes_down: int = Field(ge=0)
    chain: str
    best: dict[str, float] = {}
    acted: list[str] = []
    conditions: dict[str, dict[str, Any]] = {}


class _Progress(BaseModel):
    ledger: _Ledger
    tables: dict[Annotated[str, Field(pattern=r"^\w+$")], str]


def check_progress(folder: Path, t: int, progress: Mapping[str, Any]) -> None:
    """Insist that a run can go on from what its checkpoint of round t has of it."""
    try:
        _Progress.model_validate(progress, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Damaged(
            f"{folder}: the checkpoint of round {t} is damaged: {where}: {first['msg']}"
        ) from None


def check_tables(folder: Path, t: int, progress: Mapping[str, Any]) -> None:
    """Insist also that the tables are those of that checkpoint."""
    check_progress(folder, t, progress)
    for name, chain in progress["tables"].items():
        Table(folder, name).check(t, chain)


def write_table(path: Path, table: pa.Table) -> None:
    _write(path, [table], table.schema)


def _chained(chain: str, part: Path) -> str:
    return hashlib.sha256(f"{chain}{atomic.checksum(part)}".encode()).hexdigest()[:32]


def _read(path: Path) -> pa.Table:
    with pq.ParquetFile(path) as file:  # twice as fast as `read_table`, which also reads folders
        return file.read()


def _write(path: Path, tables: Iterable[pa.Table], schema: pa.Schema) -> None:
    with atomic.replacing(path) as aside, pq.ParquetWriter(aside, schema) as writer:
        for table in tables:
            writer.write_table(table)
