"""Warnings of tables that networks cannot learn from."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedsim.data import Dataset, datasets, load_dataset
from fedsim.data.dataset import fitted
from fedsim.data.sources.from_python import keep
from fedsim.data.sources.keel import Keel
from fedsim.data.sources.tables import Table
from fedsim.errors import FedsimWarning

N = 300
RNG = np.random.default_rng(0)
AGE = RNG.normal(45, 12, N).round()
INCOME = (RNG.normal(52_000, 14_000, N) + 900 * (AGE - 45)).round()
TARGET = (INCOME > 52_000).astype(int)
FRAME = pd.DataFrame({"age": AGE, "smokes": RNG.integers(0, 2, N), "y": TARGET})


def warned(source: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_dataset(source)
    return [str(each.message) for each in caught if each.category is FedsimWarning]


def table(path: Path, **columns: Any) -> Path:
    FRAME.assign(**columns).to_csv(path / "it.csv", index=False)
    return path / "it.csv"


SCALED = "networks train badly or not at all; set data.scale=standard"


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"income": INCOME}, ["smokes", "income"]),
        ({"tiny": 1e-5 * RNG.random(N)}, ["tiny", "age"]),
        ({"year": 2000 + RNG.integers(0, 20, N)}, ["smokes", "year"]),
        ({"bmi": RNG.normal(25, 4, N)}, []),
        ({"same": 1e6}, []),  # a constant is harmless once it is centred
    ],
)
def test_scales_that_are_far_apart(tmp_path: Path, columns: Any, named: list[str]) -> None:
    path = table(tmp_path, **columns)
    found = warned(Table(path=path, label="y"))
    assert len(found) == bool(named)
    for each in found:
        assert each.startswith("data: scales are far apart or far from 1 (")
        assert each.endswith(SCALED)
        assert all(f"'{name}': " in each for name in named)
    for scale in ("standard", "minmax"):
        assert warned(Table(path=path, label="y", scale=scale)) == []


def test_scales_of_a_target_and_of_other_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = table(tmp_path, price=INCOME * 4)
    (found,) = warned(Table(path=path, target="price"))
    assert "'price': " in found
    assert warned(Table(path=path, target="price", scale="standard")) == []
    rows = "\n".join(f"{a},{i}" for a, i in zip(AGE, INCOME, strict=True))
    path = tmp_path / "it.dat"
    path.write_text(f"@relation r\n@attribute age real\n@attribute income real\n@data\n{rows}\n")
    assert len(warned(Keel(path=path))) == 1
    assert warned(Keel(path=path, scale="standard")) == []
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path))
    data = Dataset.of(np.stack([AGE, INCOME, np.arange(N)], axis=1), TARGET)
    scales, identifier = sorted(warned(datasets.parse(keep(data))))[::-1]
    assert scales.endswith("; scale by mean and deviation")
    assert "'x3' may be an identifier" in identifier


@pytest.mark.parametrize(("words", "told"), [(600, True), (499, False), (9, False)])
def test_documents_in_which_most_words_are_different(
    tmp_path: Path, words: int, told: bool
) -> None:
    """A thousand words, of which so many are different."""
    row = [f"w{k % words}" for k in range(1000)]
    lines = [f"{k % 2}\t{' '.join(row[20 * k : 20 * k + 20])}\n" for k in range(50)]
    (tmp_path / "it.txt").write_text("".join(lines))
    (tmp_path / "test.txt").write_text("".join(lines))
    source = {"name": "text", "path": tmp_path / "it.txt"}
    found = warned(datasets.parse({**source, "test_path": tmp_path / "test.txt"}))
    expected = (
        f"data: {words} of 1,000 words are different, so that most occur only once; is it the "
        "text, and are its words separated by spaces?"
    )
    assert [each for each in found if "random vectors" not in each] == [expected] * told


IDENTIFIERS = {
    "counted": ("row", np.arange(N)),
    "left by pandas": ("Unnamed: 0", np.arange(N)),
    "shuffled": ("number", RNG.permutation(N) + 100_000),
    "in order": ("visit", np.cumsum(RNG.integers(1, 900, N))),
    "backwards": ("visit", -np.cumsum(RNG.integers(1, 900, N))),
    "drawn": ("patient_id", RNG.choice(900_000, N, replace=False) + 100_000),
    "drawn, in capitals": ("ID", RNG.choice(900_000, N, replace=False) + 100_000),
    "drawn, of java": ("patientId", RNG.choice(900_000, N, replace=False) + 100_000),
    "beyond float32": ("patient_id", 10**12 + RNG.choice(10**9, N, replace=False)),
}


@pytest.mark.parametrize("kind", IDENTIFIERS)
def test_identifiers_as_features(tmp_path: Path, kind: str) -> None:
    name, values = IDENTIFIERS[kind]
    path = table(tmp_path, **{name: values})
    expected = (
        f"data: '{name}' may be an identifier, as every example may have another whole number; "
        "leave it out of the features"
    )
    for scale in ("none", "standard", "minmax"):
        found = warned(Table(path=path, label="y", scale=scale))
        found = [each for each in found if "scales" not in each]
        if kind == "beyond float32":
            assert "float32 cannot hold" in found.pop(0)
        assert found == [expected]
    assert warned(Table(path=path, label="y", features=("age", "smokes"))) == []


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("income", INCOME),
        ("paid", RNG.permutation(N) + 0.5),
        ("valid", RNG.integers(0, 90, N)),
        ("id", np.full(N, 2e7)),
        ("large", np.full(N, 100_000_000)),
        ("station_id", np.repeat(np.arange(N // 5), 5)),
        ("large_id", 3e7 + 1000 * np.repeat(np.arange(N // 5), 5)),
    ],
)
def test_other_numbers_are_no_identifiers(tmp_path: Path, name: str, values: Any) -> None:
    path = table(tmp_path, **{name: values})
    for scale in ("none", "standard"):
        found = warned(Table(path=path, label="y", scale=scale))
        assert not any("identifier" in each for each in found)
    few = pd.DataFrame({"age": [3, 9, 1, 7, 5, 2, 8, 4, 6, 0], "y": [0, 1] * 5})  # of few rows
    few.to_csv(path, index=False)
    assert not any("identifier" in each for each in warned(Table(path=path, label="y")))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_standard_scaling(tmp_path: Path, dtype: Any) -> None:
    path = table(tmp_path, income=INCOME, same=0.1)
    predicts = {"label": "y"} if dtype == np.float32 else {"target": "income"}
    raw = Table(path=path, **predicts).load()
    data, _ = fitted(Table(path=path, scale="standard", **predicts).load())
    assert data.x.dtype == data.test_x.dtype == dtype
    x, test_x = (np.asarray(a, np.float64) for a in (raw.x, raw.test_x))
    spread = np.where(np.ptp(x, axis=0) > 0, x.std(axis=0), np.inf)
    np.testing.assert_allclose(data.x, (x - x.mean(axis=0)) / spread, atol=1e-3)
    np.testing.assert_allclose(data.test_x, (test_x - x.mean(axis=0)) / spread, atol=1e-3)
    assert not np.asarray(data.x)[:, data.features.index("same")].any()
    if "target" in predicts:
        assert (data.y.mean(), data.y.std()) == pytest.approx((0, 1))
        np.testing.assert_allclose(data.target_scaling.undo(data.test_y), raw.test_y)
