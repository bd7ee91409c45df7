"""Models side by side and against the time before, against slow loops over pairs and inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import spearmanr

from fedsim.explain.compare import Key, Recorded, recorded
from fedsim.explain.scores.measure import Explained
from fedsim.explain.section import SIMILARITIES, Explain

m, P = 3, 12
SHORT = (12, 7, 2)  # words of three documents
SHARED = ["agreement", "global_agreement", "drift"]
GLOBAL: Key = ("global", None)
KEYS: list[Key] = [GLOBAL, *(("cohort", k) for k in (2, 5, 7))]


def explained(seed: int, lengths: Iterable[int] = (P,) * m, **about: Any) -> Explained:
    """A model's maps of no two equal numbers, zero beyond the ends of documents."""
    present = np.arange(P) < np.array([*lengths])[:, None]
    relevance = np.random.default_rng(seed).standard_normal((m, P)).astype(np.float32) * present
    rows = np.array([4, 8, 9])
    return Explained(rows, relevance, present, **{"scores": {}, "seconds": 1.0, **about})


def models(keys: Iterable[Key] = KEYS, lengths: Iterable[int] = (P,) * m) -> dict[Key, Explained]:
    return {key: explained(1 + sum(map(ord, str(key))), lengths) for key in keys}


def section(*scores: str, **fields: Any) -> Explain:
    of = ("global", "cohort", "personal")
    return Explain(**{"explainers": ["random"], "of": of, "scores": scores or SHARED, **fields})


def compared(
    found: dict[Key, Explained], about: Explain | None = None, before: Any = None
) -> Recorded:
    return recorded(about or section(), {"random": found}, before or {})


def row_of(made: Recorded, key: Key) -> dict[str, Any]:
    (row,) = (row for row in made.rows if (row["model"], row["client"]) == key)
    return row


# slow loops


def cosine(a: NDArray[Any], b: NDArray[Any]) -> float:
    dot, one, other = (
        math.fsum(float(p) * float(q) for p, q in zip(*two, strict=True))
        for two in ((a, b), (a, a), (b, b))
    )
    return dot / math.sqrt(one * other)


def top_k(a: NDArray[Any], b: NDArray[Any], k: int | None) -> float:
    k = max(1, round(len(a) / 10)) if k is None else min(k, len(a))
    best = [set(sorted(range(len(v)), key=lambda p, v=v: (-v[p], p))[:k]) for v in (a, b)]
    return len(best[0] & best[1]) / k


def alike(one: Explained, other: Explained, how: str, k: int | None = None) -> float:
    """The mean over inputs of how alike two models' maps are, in what there is of each input."""
    values = []
    for a, b, there in zip(one.relevance, other.relevance, one.present, strict=True):
        a, b = a[there], b[there]
        if how == "rank":
            values.append(float(spearmanr(a, b).statistic))
        else:
            values.append(cosine(a, b) if how == "cosine" else top_k(a, b, k))
    return sum(values) / len(values)


class TestSlowLoops:
    @pytest.mark.parametrize("k", [None, 1, 3, 12])
    @pytest.mark.parametrize("lengths", [(P,) * m, SHORT])
    def test_rows_and_columns(self, lengths: tuple[int, ...], k: int | None) -> None:
        found, about = models(lengths=lengths), section(top_k=k)
        before = {key: explained(90 + i, lengths) for i, key in enumerate(KEYS[:3])}
        made = compared(found, about, compared(before, about).last)
        clients = KEYS[1:]
        for how in SIMILARITIES:
            for key in clients:
                others = [alike(found[key], found[o], how, k) for o in clients if o != key]
                row = row_of(made, key)
                assert row[f"agreement_{how}"] == pytest.approx(sum(others) / len(others))
                to_global = alike(found[key], found[GLOBAL], how, k)
                assert row[f"global_agreement_{how}"] == pytest.approx(to_global)
            for key in before:
                drift = 1 - alike(found[key], before[key], how, k)
                assert row_of(made, key)[f"drift_{how}"] == pytest.approx(drift)
            pairs = [
                alike(found[a], found[b], how, k) for a, b in itertools.combinations(clients, 2)
            ]
            column = made.columns[f"random/client_agreement_{how}"]
            assert column == pytest.approx(sum(pairs) / len(pairs))
            drifts = [row_of(made, key)[f"drift_{how}"] for key in KEYS[1:3]]
            assert made.columns[f"random/client_drift_{how}"] == pytest.approx(sum(drifts) / 2)
            drift = row_of(made, GLOBAL)[f"drift_{how}"]
            assert made.columns[f"random/drift_{how}"] == drift
        assert "drift_rank" not in row_of(made, KEYS[3])  # not explained the time before
        assert "agreement_rank" not in row_of(made, GLOBAL)

    def test_nothing_is_said_of_a_client_alone(self) -> None:
        made = compared(models(KEYS[:2]))
        assert not any("client_agreement" in column for column in made.columns)
        assert any("client_global_agreement" in column for column in made.columns)

    def test_clients_agree_with_those_of_their_kind(self) -> None:
        keys: list[Key] = [*KEYS, ("personal", 2), ("personal", 5)]
        found = models(keys)
        made = compared(found)
        pair = alike(found["personal", 2], found["personal", 5], "cosine")
        assert made.columns["random/personal_agreement_cosine"] == pytest.approx(pair)
        assert row_of(made, ("personal", 2))["agreement_cosine"] == pytest.approx(pair)
        without = compared(models(KEYS)).columns
        assert {name: made.columns[name] for name in without} == without

    def test_of_each_explainer_by_itself(self) -> None:
        one, other = models(), {key: explained(40 + i) for i, key in enumerate(KEYS)}
        about = section(explainers=["random", "gradient"])
        made = recorded(about, {"random": one, "gradient": other}, {})
        alone = [compared(one, about), recorded(about, {"gradient": other}, {})]
        assert made.columns == alone[0].columns | alone[1].columns
        assert made.rows == alone[0].rows + alone[1].rows


class TestDrift:
    def test_is_from_the_time_before_alone(self) -> None:
        """Whoever was not explained then has none; maps are not piled up."""
        first, second = models(KEYS[:2]), models([GLOBAL])
        last = compared(second, before=compared(first).last).last
        assert set(last["random"]) == {"global"}
        assert "drift_rank" not in row_of(compared(first, before=last), KEYS[1])

    def test_is_of_the_same_inputs(self) -> None:
        """Clients' own inputs are others when they learn another task."""
        found = models()
        for rows, shape in (([4, 8, 10], m), ([4, 8], 2)):
            now = {
                key: Explained(np.array(rows), one.relevance[:shape], one.present[:shape], {})
                for key, one in found.items()
            }
            made = compared(now, section("drift"), compared(found).last)
            assert not made.columns
            assert all(set(row) == {"explainer", "model", "client"} for row in made.rows)

    def test_is_of_maps_of_the_same_size(self) -> None:
        """Others are no run's own: somebody has edited the checkpoint."""
        last = compared(models()).last
        for old in last["random"].values():
            old["relevance"] = old["relevance"][:, :5]
        made = compared(models(), section("drift"), last)
        assert not made.columns

    def test_carries_no_maps_along_unless_it_is_asked_for(self) -> None:
        assert compared(models(), section("agreement", maps=True)).last == {}
        assert compared(models(), section("drift")).last.keys() == {"random"}

    def test_is_of_the_same_client_and_kind(self) -> None:
        before = compared({("cohort", 5): explained(1)}).last
        made = compared({("personal", 5): explained(1), ("cohort", 6): explained(1)}, None, before)
        assert not any("drift" in column for column in made.columns)


class TestMeans:
    def test_are_of_what_is_defined(self) -> None:
        nan = np.nan
        found = {
            GLOBAL: explained(0, scores={"deletion": np.array([0.5, nan, 0.25])}),
            ("cohort", 1): explained(1, scores={"deletion": np.array([nan, nan, nan])}),
            ("cohort", 3): explained(2, scores={"deletion": np.array([nan, 1.0, 0.5])}),
            ("cohort", 4): explained(2, scores={"deletion": np.array([1.0, 1.0, 0.25])}),
        }
        made = compared(found, section("deletion"))
        assert [row["deletion"] for row in made.rows] == [0.375, None, 0.75, 0.75]
        assert made.columns == {"random/deletion": 0.375, "random/client_deletion": 0.75}

    def test_of_nothing_are_no_columns(self) -> None:
        nowhere = {"deletion": np.full(m, np.nan)}
        made = compared({GLOBAL: explained(0, scores=nowhere)}, section("deletion"))
        assert made.columns == {}
        assert row_of(made, GLOBAL)["deletion"] is None

    def test_maps_that_are_not_finite_are_like_no_other(self) -> None:
        """Not even like each other."""
        for lengths in ((P,) * m, SHORT):
            found = models(lengths=lengths)
            before = compared(found)
            for one in found.values():
                one.relevance[1] = np.nan
            made = compared(found, before=before.last)
            a, b = (found["cohort", k] for k in (2, 5))
            whole = [0, 2]
            kept = [
                Explained(x.inputs[whole], x.relevance[whole], x.present[whole], {})
                for x in (a, b)
            ]
            pair = compared({("cohort", 2): kept[0], ("cohort", 5): kept[1]})
            alone = compared({("cohort", 2): a, ("cohort", 5): b})
            assert pair.columns == alone.columns
            for how in SIMILARITIES:  # of the two inputs that are left, which have not changed
                assert made.columns[f"random/drift_{how}"] == pytest.approx(0, abs=1e-12)

    def test_a_similarity_without_an_order_is_left_out(self) -> None:
        """Of one word ranks say nothing, but where the maps are equal."""
        found = models(lengths=(P, 1, 1))
        found["cohort", 5].relevance[1] = found["cohort", 2].relevance[1]
        made = compared({key: found[key] for key in (("cohort", 2), ("cohort", 5))})
        a, b = (found["cohort", k].relevance[0] for k in (2, 5))
        expected = (float(spearmanr(a, b).statistic) + 1) / 2
        assert row_of(made, ("cohort", 2))["agreement_rank"] == pytest.approx(expected)


class TestNames:
    def test_of_rows(self) -> None:
        made = compared(models())
        assert [(row["explainer"], row["model"], row["client"]) for row in made.rows] == [
            ("random", whose, client) for whose, client in KEYS
        ]
        assert made.maps == []

    def test_what_is_not_asked_for_is_not_there(self) -> None:
        before = compared(models()).last
        for name in SHARED:
            made = compared(models(), section(name), before)
            assert {column.partition("/")[2] for column in made.columns} == {
                f"{prefix}{name}_{how}"
                for prefix in (("", "client_") if name == "drift" else ("client_",))
                for how in SIMILARITIES
            }


def test_maps() -> None:
    curves = {"deletion": np.arange(6.0).reshape(m, 2)}
    found = {key: explained(i, curves=curves) for i, key in enumerate(KEYS[:2])}
    made = compared(found, section("deletion", "drift", maps=True))
    assert len(made.maps) == 2 * m
    for i, row in enumerate(made.maps):
        key, k = KEYS[i // m], i % m
        arrays = {"relevance": found[key].relevance[k], "deletion": curves["deletion"][k]}
        for name, array in arrays.items():
            np.testing.assert_array_equal(row.pop(name), array)
        about = {"explainer": "random", "model": key[0], "client": key[1]}
        assert row == {**about, "input": [4, 8, 9][k]}
    np.testing.assert_array_equal(
        made.last["random"]["cohort 2"]["relevance"], explained(1).relevance
    )


@settings(max_examples=25)
@given(st.permutations(range(4)), st.integers(0, 9))
def test_the_order_of_clients_changes_nothing(order: list[int], seed: int) -> None:
    clients: list[Key] = [("cohort", k) for k in range(4)]
    found = {key: explained(10 * seed + i) for i, key in enumerate([GLOBAL, *clients])}
    shuffled = {key: found[key] for key in (*(clients[i] for i in order), GLOBAL)}
    before = compared({key: explained(7) for key in found}).last
    one, other = compared(found, before=before), compared(shuffled, before=before)
    assert one.columns == other.columns
    for key in found:
        assert row_of(one, key) == row_of(other, key)
