"""Tables grow in parts, forget what is taken back, and end as one file."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import examples
from fedsim.errors import Damaged, RunError
from fedsim.results.tables import Table
from fedsim.support import atomic

Rows = list[dict[str, Any]]


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def rows(frame: pd.DataFrame) -> Rows:
    """The rows, without the cells that are empty."""
    return [
        {name: value for name, value in row.items() if not pd.isna(value)}
        for row in frame.to_dict("records")
    ]


def filled(folder: Path, parts: dict[int, Rows]) -> Table:
    table = Table(folder, "rounds")
    for t, part in parts.items():
        table.add(part)
        table.flush(t)
    return table


def finish(table: Table) -> None:
    table.merge()
    table.drop_parts()


PARTS: dict[int, Rows] = {
    2: [{"round": 1, "loss": 2}, {"round": 2, "loss": 1.5}],
    4: [{"round": 3, "accuracy": 0.5}, {"round": 4, "error": "NaN in 'weights'"}],
    6: [{"round": 5, "loss": None}, {"accuracy": 1, "round": 6}],
}
ALL = [*PARTS[2], *PARTS[4], {"round": 5}, {"round": 6, "accuracy": 1}]


@pytest.mark.parametrize("finished", [False, True])
def test_rows_come_back_as_they_were_added(tmp_path: Path, finished: bool) -> None:
    table = filled(tmp_path, PARTS)
    parts = {f"rounds.parts/00000{t}.parquet" for t in PARTS}  # the round that it ends with
    if finished:
        finish(table)
    assert files(tmp_path) == ({"rounds.parquet"} if finished else {"rounds.parts", *parts})
    frame = Table(tmp_path, "rounds").read()
    assert rows(frame) == ALL
    assert list(frame.columns) == ["round", "loss", "accuracy", "error"]
    assert frame["round"].dtype == "int64"
    assert frame["loss"].dtype == frame["accuracy"].dtype == "float64"


@pytest.mark.parametrize(("to", "left"), [(0, 0), (2, 2), (4, 4), (6, 6), (9, 6)])
def test_rewound(tmp_path: Path, to: int, left: int) -> None:
    table = filled(tmp_path, PARTS)
    table.add([{"round": 99}])
    table.rewind(to, "")
    assert rows(table.read()) == ALL[:left]
    table.add([{"round": 7}])
    table.flush(7)
    finish(table)
    assert rows(table.read()) == [*ALL[:left], {"round": 7}]


def test_nothing(tmp_path: Path) -> None:
    table = Table(tmp_path, "rounds")
    table.flush(1)
    table.rewind(0, "")
    assert table.read().empty
    finish(table)
    assert table.read().empty
    assert files(tmp_path) == set()


def test_finishing_can_be_broken_off_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies while it clears away the parts loses no row."""
    for survives in range(4):
        folder = tmp_path / str(survives)
        folder.mkdir()
        table = filled(folder, PARTS)
        left, unlink = survives, os.unlink

        def dying(*args: Any, unlink: Any = unlink, **keywords: Any) -> None:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            unlink(*args, **keywords)

        monkeypatch.setattr(os, "unlink", dying)
        with contextlib.suppress(KeyboardInterrupt):
            finish(table)
        monkeypatch.undo()
        resumed = Table(folder, "rounds")
        assert rows(resumed.read()) == ALL
        resumed.drop_parts()
        assert rows(resumed.read()) == ALL
        assert files(folder) == {"rounds.parquet"}


def broken(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGES = [broken, Path.unlink, lambda path: path.write_bytes(b"PAR1")]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("t", [2, 4, 6])
def test_a_damaged_part_is_noticed(tmp_path: Path, t: int, damage: Any) -> None:
    table = Table(tmp_path, "rounds")
    chains = {0: ""}
    for end, part in PARTS.items():
        table.add(part)
        table.flush(end)
        chains[end] = table.chain
    damage(tmp_path / f"rounds.parts/{t:06d}.parquet")
    for end, chain in chains.items():
        if end < t:
            Table(tmp_path, "rounds").check(end, chain)
        else:
            with pytest.raises(Damaged, match=r"rounds\.parts/.*is (damaged|missing)"):
                Table(tmp_path, "rounds").check(end, chain)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_table_is_not_read(tmp_path: Path, damage: Any) -> None:
    table = filled(tmp_path, PARTS)
    finish(table)
    checksum = atomic.checksum(table.file)
    assert rows(table.read(checksum)) == ALL
    damage(table.file)
    with pytest.raises(Damaged, match=f"{table.file}: is damaged: "):
        table.read(checksum)


cells = {
    "loss": st.none() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False),
    "clients": st.integers(-(2**63), 2**63 - 1),
    "error": st.text(max_size=5),
    "flag": st.booleans(),
}
ragged = st.lists(
    st.fixed_dictionaries({"round": st.just(1)}, optional=cells), min_size=1, max_size=4
)


@examples(30)
@given(parts=st.lists(ragged, min_size=1, max_size=4), finished=st.booleans())
def test_ragged_columns(parts: list[Rows], finished: bool) -> None:
    """Any column may be missing from any row, and from all rows of a part."""
    given_rows = [row for part in parts for row in part]
    with tempfile.TemporaryDirectory() as folder:
        table = filled(Path(folder), dict(enumerate(parts, start=1)))
        if finished:
            finish(table)
        read = table.read()
    assert list(read.columns) == list(dict.fromkeys(name for row in given_rows for name in row))
    for found, row in zip(rows(read), given_rows, strict=True):
        expected = {name: value for name, value in row.items() if value is not None}
        for of in (found, expected):  # a column with gaps has numbers of floating point
            of |= {n: float(v) for n, v in of.items() if not isinstance(v, str | bool)}
        assert found == expected


def test_a_column_of_two_types_is_refused_in_words(tmp_path: Path) -> None:
    table = Table(tmp_path, "clients")
    table.add([{"client": 0, "tag": "odd"}, {"client": 1, "tag": 1.0}])
    with pytest.raises(RunError, match=r"clients.parquet: a column mixes types"):
        table.flush(1)
    other = Table(tmp_path, "rounds")
    for t, tag in ((1, "odd"), (2, 1.0)):
        other.add([{"round": t, "tag": tag}])
        other.flush(t)
    with pytest.raises(RunError, match=r"rounds.parquet: a column mixes types"):
        finish(other)
