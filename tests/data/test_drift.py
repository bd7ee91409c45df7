"""Clients that drift: who, what of their inputs, and from when on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import examples, small_experiment
from fedsim import Run, replay, run
from fedsim.analysis.replay import ModelSnapshot, client_models
from fedsim.data import ClientSplits, Dataset, datasets, partitions
from fedsim.data.drift import Drifting
from fedsim.launch.prepare import dealt

SMALL = {"samples": 120, "test_samples": 40}
CLUSTERS = {"name": "synthetic", **SMALL, "classes": 3, "shape": [6]}
FRIEDMAN = {"name": "friedman", **SMALL}
IMAGES = {"name": "synthetic", **SMALL, "shape": [2, 5, 4], "classes": 3}
DIGITS = {"name": "digits"}
REVIEWS = {"name": "planted_reviews", "reviews": 20, "test_reviews": 15, "dimension": 4}
OF = [(CLUSTERS, "shift"), (CLUSTERS, "shuffle"), (FRIEDMAN, "shift"), (FRIEDMAN, "shuffle")]
OF += [(IMAGES, "noise"), (IMAGES, "invert"), (DIGITS, "invert")]


@cache
def loaded(number: int) -> Dataset:
    return datasets.parse(OF[number][0]).load()


def source(of: dict[str, Any], **fields: Any) -> Drifting:
    found = datasets.parse({"name": "drift", "of": of, "round": 3, **fields})
    assert isinstance(found, Drifting)
    return found


def deal(made: Drifting, seed: int = 0, **fields: Any) -> tuple[Dataset, ClientSplits]:
    data = made.load()
    splits = partitions.parse({"kind": "iid", **fields}).deal(data, seed)
    return made.for_clients(data, splits, seed)


def parts(splits: ClientSplits, k: int) -> list[list[int]]:
    return [own[k].tolist() for own in (splits.train, splits.unlabelled, splits.test)]


@pytest.mark.parametrize("number", range(len(OF)))
@examples(3)
@given(
    K=st.integers(1, 9),
    share=st.floats(0.01, 1),
    count=st.integers(1, 3),
    seed=st.integers(0, 2**64),
)
def test_what_changes_and_what_does_not(
    number: int, K: int, share: float, count: int, seed: int
) -> None:
    (of, kind), base = OF[number], loaded(number)
    strength = {"strength": 0.5} if kind in ("shift", "noise") else {}
    features = {"features": count} if kind in ("shift", "shuffle") else {}
    made = source(of, kind=kind, clients=share, **strength, **features)
    own = {"test_fraction": 0.3, "labelled_fraction": 0.6, "server_fraction": 0.1}
    data, splits = deal(made, seed, clients=K, **own)
    plain = partitions.parse({"kind": "iid", "clients": K, **own}).deal(base, seed)
    drift, N = splits.change, len(base.y)
    assert drift is not None
    for t in (0, 1, 2):
        assert splits.at(t, 9) is splits
    for t in (3, 4, 9):
        assert splits.at(t, 9) is drift.splits
    assert drift.splits.server is splits.server
    assert list(drift.clients) == made.drifting(K, seed)
    assert len(drift.clients) == max(1, round(share * K))
    # The rows that were loaded are untouched, and so is who holds them.
    np.testing.assert_array_equal(data.x[:N], base.x)
    np.testing.assert_array_equal(data.y[:N], base.y)
    np.testing.assert_array_equal(data.test_x, base.test_x)
    assert data.x.dtype == base.x.dtype
    for k in range(K):
        assert parts(splits, k) == parts(plain, k)
        if k not in drift.clients:
            assert parts(drift.splits, k) == parts(plain, k)
            continue
        before, after = (np.concatenate(parts(s, k)).astype(int) for s in (splits, drift.splits))
        assert [len(p) for p in parts(drift.splits, k)] == [len(p) for p in parts(plain, k)]
        np.testing.assert_array_equal(data.y[after], base.y[before])
        x, changed = base.x[before], data.x[after]
        if kind in ("shift", "shuffle"):
            names = data.features or [f"x{f + 1}" for f in range(data.shape[0])]
            columns = [names.index(name) for name in drift.features]
            assert len(columns) == count
            rest = np.delete(np.arange(data.shape[0]), columns)
            np.testing.assert_array_equal(changed[:, rest], x[:, rest])
            x, changed = x[:, columns], changed[:, columns]
        if kind == "shift":
            moved = 0.5 * base.x[:, columns].std(axis=0)
            np.testing.assert_allclose(changed - x, np.tile(moved, (len(x), 1)), rtol=1e-4)
        elif kind == "shuffle":
            np.testing.assert_array_equal(np.sort(changed, axis=0), np.sort(x, axis=0))
            assert len(x) < 5 or (changed != x).any(axis=0).all()
        elif kind == "invert":
            middle = (float(base.x.min()) + float(base.x.max())) / 2
            np.testing.assert_allclose((changed + x) / 2, middle, rtol=1e-4)
        else:
            assert base.x.min() <= changed.min() <= changed.max() <= base.x.max()
            off = (changed - x)[(changed > base.x.min()) & (changed < base.x.max())]
            assert off.std() == pytest.approx(0.5 * base.x.std(), rel=0.25)
            assert (changed != x).mean() > 0.9
    # Each changed copy is one client's.
    copies = np.concatenate([np.concatenate(parts(drift.splits, k)) for k in drift.clients])
    assert sorted(copies) == list(range(N, N + data.copies)) == list(range(N, len(data.y)))


def test_named_columns_and_draws() -> None:
    data, splits = deal(source(CLUSTERS, features=["x5", "x2"]), clients=4)
    assert splits.change is not None
    assert splits.change.features == ("x2", "x5")
    changed = data.x[120:] != data.x[splits.train[splits.change.clients[0]]]
    assert np.flatnonzero(changed.any(axis=0)).tolist() == [1, 4]
    drawn = [source(CLUSTERS).for_clients(loaded(0), splits, seed)[1].change for seed in range(9)]
    assert len({change.features for change in drawn if change}) > 2
    few, more = source(CLUSTERS, clients=0.3), source(CLUSTERS, clients=0.8)
    assert set(few.drifting(10, 0)) < set(more.drifting(10, 0))
    assert few.drifting(10, 0) != few.drifting(10, 1)


def test_bytes_stay_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (60, 3), np.uint8), np.arange(60) % 2
    x[:, 2] = 9  # what is constant is not drawn
    np.savez(tmp_path / "bytes.npz", x=x, y=y)
    of = {"name": "npz", "path": str(tmp_path / "bytes.npz")}
    data, splits = deal(source(of, features=["x1"], strength=2, clients=1), clients=1)
    assert splits.change is not None
    N = len(data.y) - data.copies
    assert data.x.dtype == np.uint8
    moved = np.minimum(np.rint(data.x[:N, 0] + 2 * data.x[:N, 0].std()), 255)
    np.testing.assert_array_equal(data.x[splits.change.splits.train[0], 0], moved[splits.train[0]])
    _, splits = deal(source(of, features=2, clients=1), clients=1)
    assert splits.change is not None
    assert splits.change.features == ("x1", "x2")


def test_data_that_were_made_ready_are_dealt_out_as_before() -> None:
    made = source(CLUSTERS, features=2, clients=0.5)
    data, splits = deal(made, clients=5)
    assert deal(made, clients=5)[0].x.tobytes() == data.x.tobytes()
    dealt = partitions.parse({"kind": "iid", "clients": 5}).deal(data, 0)
    again, as_before = made.for_clients(data, dealt, 0)
    assert again is data
    assert splits.change is not None
    assert as_before.change is not None
    assert splits.change.facts() == as_before.change.facts()
    for k in range(5):
        assert parts(as_before.at(3, 9), k) == parts(splits.at(3, 9), k)


def sections(**drift: Any) -> dict[str, Any]:
    return {
        "data": {"name": "drift", "of": CLUSTERS, "round": 3, "clients": 0.4, **drift},
        "partition": {"kind": "iid", "clients": 5, "test_fraction": 0.3},
        "train": {"rounds": 4},
    }


@pytest.mark.parametrize("method", ["scaffold", "centralised"])
def test_nothing_is_different_before_the_round(finish: Callable[..., Run], method: str) -> None:
    about = {**sections(strength=3), "method": {"name": method}}
    drifted, plain = finish(**about), finish(**{**about, "data": CLUSTERS})
    tables = ("rounds",) if method == "centralised" else ("rounds", "clients")
    for table in tables:
        a, b = (getattr(run, table) for run in (drifted, plain))
        a, b = (frame.drop(columns=[c for c in frame if "seconds" in c]) for frame in (a, b))
        early = a["round"] < 3
        assert a[early].equals(b[early]), table
        assert early.any()
        late = [frame.loc[frame["round"] == 3, "loss"].tolist() for frame in (a, b)]
        assert late[0] != late[1], table
    weights = [replay(run, after=2).state.weights for run in (drifted, plain)]  # type: ignore[attr-defined]
    assert weights[0].tobytes() == weights[1].tobytes()


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    made = small_experiment(**sections(), checkpoint={"every": 1, "keep": "all"})
    return run(made, tmp_path_factory.mktemp("runs"))


def test_only_clients_that_drift_train_on_something_else(
    finish: Callable[..., Run], done: Run
) -> None:
    changed = finish(**sections(round=1, strength=3))
    assert changed.manifest["change"]["round"] == 1
    drifting = changed.manifest["change"]["clients"]
    assert len(drifting) == 2
    assert len(changed.manifest["change"]["features"]) == 1
    a, b = (run.clients.query("round == 1").set_index("client") for run in (changed, done))
    assert a.index[a["loss"] != b["loss"]].tolist() == drifting
    assert set(a.index[a["samples"] != b["samples"]]) <= set(drifting)


def test_the_same_bits_from_any_round(finish: Callable[..., Run], done: Run) -> None:
    assert finish(**sections()).result_hash == done.result_hash
    for after in (2, 3, 4):
        assert replay(done, after=after).after == after  # compared with the record
    models, at = client_models(done, [0, 3], after=3)  # which makes the data ready twice
    assert set(models) == {0, 3}
    drift = at.splits.change
    assert drift is not None
    client = drift.clients[0]
    for after in (2, 3):
        own = ModelSnapshot.of(done, client=client, after=after).data().own
        held = at.splits.at(after, 4).train[client]
        np.testing.assert_array_equal(own, at.dataset.x[held])


def test_own_inputs_that_are_explained_drift(finish: Callable[..., Run]) -> None:
    explain = {"explainers": ["gradient"], "inputs_from": "own", "every": 1, "clients": 5}
    done = finish(**sections(), explain={**explain, "inputs": 3, "maps": True})
    N, drifting = 120, done.manifest["change"]["clients"]
    maps = done.maps
    moved = (maps["round"] >= 3) & maps["client"].isin(drifting)
    assert ((maps["input"] >= N) == moved).all()


def test_features_of_several_entries(tmp_path: Path) -> None:
    """Numbers shift, marks of blanks stay; the entries of a category move together."""
    n = 40
    frame = pd.DataFrame(
        {
            "age": np.where(np.arange(n) % 5 == 4, np.nan, np.arange(n)),
            "ward": np.array(["north", "south", "east"])[np.arange(n) % 3],
            "ill": np.arange(n) % 2,
            "site": np.arange(n) % 4,
        }
    )
    frame.to_csv(tmp_path / "t.csv", index=False)
    of = {
        **{"name": "table", "path": str(tmp_path / "t.csv"), "label": "ill"},
        **{"missing": "mean", "indicator": True, "columns": ["site"]},
    }
    for features, kind in ((["age"], "shift"), (["ward"], "shuffle")):
        section = {"name": "drift", "of": of, "round": 2, "features": features, "kind": kind}
        experiment = small_experiment(
            data=section, partition={"kind": "natural", "column": "site"}, model={"name": "mlp"}
        )
        data, splits, _ = dealt(experiment)
        assert splits.change is not None
        (k,) = splits.change.clients
        before, after = data.x[splits.train[k]], data.x[splits.change.splits.train[k]]
        if kind == "shift":
            assert (after[:, 0] > before[:, 0]).all()
            assert np.array_equal(after[:, 1:], before[:, 1:])
        else:
            assert np.array_equal(after[:, :2], before[:, :2])
            assert sorted(map(tuple, after[:, 2:])) == sorted(map(tuple, before[:, 2:]))
