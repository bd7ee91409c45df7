"""How different clients' data are, against SciPy's distances."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.spatial.distance import jensenshannon
from scipy.stats import wasserstein_distance

from experiments import examples
from fedsim.cli.look import _show_blanks
from fedsim.data import ClientSplits, Dataset, Ragged
from fedsim.data.encoding import Preprocessing
from fedsim.data.skew import (
    BLANK,
    Skew,
    blank_shares,
    feature_skew,
    hellinger,
    jensen_shannon,
    label_emd,
    label_skew,
    mean_difference,
    missing_features,
    wasserstein,
)
from fedsim.errors import FedsimWarning

TABLES = st.integers(2, 5).flatmap(
    lambda labels: st.lists(
        st.lists(st.integers(0, 9), min_size=labels, max_size=labels).filter(any),
        min_size=1,
        max_size=6,
    )
)


@given(TABLES)
@examples(60)
def test_distances_of_labels(table: list[list[int]]) -> None:
    counts = np.array(table, dtype=np.float64)
    shares, whole = counts / counts.sum(axis=1, keepdims=True), counts.sum(axis=0) / counts.sum()
    js, emd, h = (f(shares, whole) for f in (jensen_shannon, label_emd, hellinger))
    np.testing.assert_allclose(js, [jensenshannon(p, whole, base=2) for p in shares], atol=1e-7)
    np.testing.assert_allclose(
        h, [np.sqrt(max(0, 1 - np.sqrt(p * whole).sum())) for p in shares], atol=1e-7
    )
    for p, distance in zip(shares, emd, strict=True):
        assert distance == pytest.approx(sum(abs(a - b) for a, b in zip(p, whole, strict=True)))
    assert (h**2 <= emd / 2 + 1e-12).all()  # with total variation, emd / 2, between
    assert (emd / 2 <= np.sqrt(2) * h + 1e-12).all()
    for distance, most in ((js, 1), (h, 1), (emd, 2)):
        assert ((distance >= 0) & (distance <= most + 1e-12)).all()
        np.testing.assert_allclose(distance[(shares == whole).all(axis=1)], 0, atol=1e-7)


def test_clients_with_nothing_in_common() -> None:
    """Of two clients with a class each; of many clients with a class each, the greatest values."""
    for count, js, h in ((2, 0.5579, 0.5412), (1000, 1, 1)):
        shares, whole = np.eye(count), np.full(count, 1 / count)
        assert jensen_shannon(shares, whole) == pytest.approx(js, abs=0.02)
        assert hellinger(shares, whole) == pytest.approx(h, abs=0.02)
        assert label_emd(shares, whole) == pytest.approx(2 - 2 / count)


NUMBERS = st.floats(-100, 100).map(lambda v: round(v, 2))
HELD = st.lists(st.lists(NUMBERS, max_size=7), min_size=1, max_size=5).filter(any)


def flat(held: list[list[float]]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The numbers that clients hold in any order, and the client of each."""
    clients = np.repeat(np.arange(len(held)), [len(own) for own in held])
    order = np.random.default_rng(0).permutation(len(clients))
    return np.array([v for own in held for v in own])[order], clients[order]


@given(HELD)
@examples(60)
def test_the_distance_of_numbers(held: list[list[float]]) -> None:
    values, clients = flat(held)
    expected = [wasserstein_distance(own, values) if own else np.nan for own in held]
    found = wasserstein(values, clients, len(held))
    np.testing.assert_allclose(found, expected, atol=1e-9)


@given(HELD)
@examples(60)
def test_differences_of_means(held: list[list[float]]) -> None:
    values, clients = flat(held)
    found = mean_difference(values, clients, len(held))
    for k, own in enumerate(held):
        others = [v for j, other in enumerate(held) if j != k for v in other]
        if not own or not others:
            assert np.isnan(found[k])
            continue
        difference = abs(np.mean(own) - np.mean(others))
        spread = np.sqrt((np.var(own) + np.var(others)) / 2)
        if difference < 1e-9:
            assert found[k] == pytest.approx(0, abs=1e-6)
        elif spread < 1e-9:
            assert found[k] == np.inf
        else:
            assert found[k] == pytest.approx(difference / spread, rel=1e-6)
    blank = np.append(values, [np.nan, np.nan]), np.append(clients, [0, len(held) - 1])
    np.testing.assert_array_equal(mean_difference(*blank, len(held)), found)


@pytest.mark.parametrize("value", [0.1, 1e9 + 0.1, -3.3e-9])
def test_equal_numbers_do_not_differ(value: float) -> None:
    clients = np.arange(300) % 7
    assert mean_difference(np.full(300, value), clients, 7).tolist() == [0] * 7


def splits(*held: list[int]) -> ClientSplits:
    """Clients that hold these examples: for training, but the last one of each for testing."""
    train, test = (Ragged.of([np.array(own, int) for own in parts]) for parts in (
        [own[:-1] for own in held], [own[-1:] for own in held]))  # fmt: skip
    nothing = Ragged.of([np.empty(0, int)] * len(held))
    return ClientSplits(train=train, unlabelled=nothing, test=test)


def dataset(x: NDArray[np.float32], y: NDArray[np.generic], **more: object) -> Dataset:
    return Dataset(x, y, x, y, **{"classes": (), **more})  # type: ignore[arg-type]


X = np.array([[0, 1], [1, 1], [2, 2], [9, 2], [10, 3], [11, 3]], np.float32)
CLIENTS = splits([0, 1, 2], [3, 4, 5], [])


def test_of_classes() -> None:
    labels = dataset(X, np.array([0, 0, 0, 1, 1, 2]), classes=("a", "b", "c"))
    found = {skew.name: skew.values.tolist() for skew in label_skew(labels, CLIENTS)}
    assert list(found) == [
        "labels: Hellinger distance (0 to 1)",
        "labels: Jensen-Shannon distance (0 to 1)",
        "labels: earth mover's distance (0 to 2)",
    ]
    assert found["labels: earth mover's distance (0 to 2)"] == pytest.approx(
        [1, 1, np.nan], nan_ok=True
    )


@pytest.mark.parametrize(
    ("target", "unit"), [("rate", "in units of rate"), ("", "in the target's unit")]
)
def test_of_a_target(target: str, unit: str) -> None:
    numbers = dataset(X, np.array([0.0, 0, 0, 4, 4, 4]), target=target)
    *others, distance = label_skew(numbers, CLIENTS)
    assert len(others) == 2
    assert distance.name == f"target: earth mover's distance ({unit})"
    assert distance.values == pytest.approx([2, 2, np.nan], nan_ok=True)


def test_several_targets_and_other_inputs_have_no_measures() -> None:
    several = dataset(X, np.zeros((6, 2)))
    assert not list(label_skew(several, CLIENTS))
    pictures = dataset(np.zeros((6, 1, 2, 2), np.float32), np.zeros(6))
    assert not list(feature_skew(pictures, CLIENTS))


def test_of_features_with_blanks() -> None:
    table = dataset(X, np.zeros(6), features=("age", "thal"))
    (means,) = feature_skew(table, CLIENTS)
    assert means.features == ("age", "thal")
    spread = np.sqrt(2 / 3)
    expected = [[9 / spread, (4 / 3) / np.sqrt(2 / 9)]] * 2 + [[np.nan, np.nan]]
    np.testing.assert_allclose(means.values, expected, rtol=1e-6)
    blank = np.array([True, False, False, True, True, True])
    x = np.where(np.array([False, True]) & blank[:, None], np.nan, X).astype(np.float32)
    unfitted = replace(table, x=x, preprocessing=Preprocessing("mean"))
    means, shares = feature_skew(unfitted, CLIENTS)
    np.testing.assert_allclose(means.values[:, 0], [9 / spread, 9 / spread, np.nan], rtol=1e-6)
    assert np.isnan(means.values[:, 1]).all()
    assert shares.features == ("thal",)
    np.testing.assert_allclose(shares.values, [[1 / 3], [1], [np.nan]])
    assert missing_features(shares) == {(1,): ["thal"]}


def test_shares_of_blanks_count_what_clients_hold() -> None:
    blanks = {name: np.array(cells, bool) for name, cells in (("a", [1, 0, 0, 1]), ("b", [1] * 4))}
    rows, clients = np.array([3, 0, 1]), np.array([2, 0, 0])
    found = blank_shares(blanks, rows, clients, 3)
    np.testing.assert_array_equal(found, [[0.5, 1], [np.nan, np.nan], [1, 1]])


def test_nothing_warns_of_empty_clients() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = splits([], [0, 1, 2])
        table = dataset(X, np.array([0, 0, 0, 1, 1, 2]), classes=("a", "b", "c"))
        for skew in (*label_skew(table, alone), *feature_skew(table, alone)):
            assert np.isnan(skew.values[0]).all()


def test_blank_cells_are_shown_by_client(capsys: pytest.CaptureFixture[str]) -> None:
    shares = Skew(BLANK, np.array([[0.25, 0], [1, 1], [1, 0.5]]), ("ca", "thal"))
    held = replace(splits([0, 1, 2], [3, 4], [5]), names=("Bern", "Kiel", "Lund"))
    with pytest.warns(FedsimWarning) as caught:
        _show_blanks(shares, held)
    assert capsys.readouterr().out.split("\n")[1:-1] == [
        "blank cells  Bern  Kiel  Lund",
        "ca            25%  100%  100%",
        "thal            ·  100%   50%",
    ]
    assert [str(each.message) for each in caught] == [
        "data: ca: all cells are blank at 2 of 3 clients (Kiel, Lund)",
        "data: thal: all cells are blank at 1 of 3 clients (Kiel)",
    ]
