"""Models side by side and against the time before, against slow loops over pairs and inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import examples
from fedsim.explain.compare import Key, Recorded, recorded
from fedsim.explain.scores.measure import Explained
from fedsim.explain.scores.relevance import cosine, informative, rank_correlation, top_k_overlap
from fedsim.explain.section import PREFIXES, SIMILARITIES, Explain

Found = dict[Key, Explained]

m, P = 3, 12
SHORT = (12, 7, 2)  # words of three documents
SHARED = ["agreement", "global_agreement", "drift"]
GLOBAL: Key = ("global", None)
KEYS: list[Key] = [GLOBAL, *(("cohort", k) for k in (2, 5, 7))]
PERSONAL: list[Key] = [("personal", 2), ("personal", 5)]


def explained(seed: int, lengths: Iterable[int] = (P,) * m, **about: Any) -> Explained:
    """A model's maps of no two equal numbers, zero beyond the ends of documents."""
    present = np.arange(P) < np.array([*lengths])[:, None]
    relevance = np.random.default_rng(seed).standard_normal((m, P)).astype(np.float32) * present
    rows = np.array([4, 8, 9])
    return Explained(rows, relevance, present, **{"scores": {}, "seconds": 1.0, **about})


def models(
    keys: Iterable[Key] = KEYS, lengths: Iterable[int] = (P,) * m, seed: int = 1, **about: Any
) -> Found:
    return {key: explained(seed + sum(map(ord, str(key))), [*lengths], **about) for key in keys}


def section(*scores: str, **fields: Any) -> Explain:
    of = ("global", "cohort", "personal")
    return Explain(**{"explainers": ["random"], "of": of, "scores": scores or SHARED, **fields})


def compared(found: Found, about: Explain | None = None, before: Any = None) -> Recorded:
    return recorded(about or section(), {"random": found}, before or {})


# slow loops


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that are defined."""
    defined = [v for v in values if v is not None and not math.isnan(v)]
    return math.fsum(defined) / len(defined) if defined else None


def alike(one: Explained, other: Explained, how: str, k: int | None) -> float | None:
    """The mean over inputs of how alike two models' maps are, in what there is of each input."""
    values: list[float | None] = []
    for a, b, there in zip(one.relevance, other.relevance, one.present, strict=True):
        pair = a[None, there], b[None, there]
        if not np.isfinite(pair).all():
            continue
        a, b = (np.where(informative(row), row, 0) for row in pair)  # or what chance does
        if how == "rank":
            values.append(rank_correlation(a, b)[0])
        elif how == "cosine":
            values.append(cosine(a, b)[0])
        else:
            size = there.sum()
            values.append(top_k_overlap(a, b, min(k, size) if k else max(1, round(size / 10)))[0])
    return mean(values)


def slowly(found: Found, about: Explain, before: Found) -> tuple[list[Any], dict[str, float]]:
    """The rows of some models and their means, which are the columns."""
    wanted, rows = about.scores or (), []
    for key, one in found.items():
        scores = {name: mean(values.tolist()) for name, values in one.scores.items()}
        others = [other for k, other in found.items() if k != key and k[0] == key[0]]
        for how in SIMILARITIES:
            compared: dict[str, float | None] = {}
            old = before.get(key)
            if "drift" in wanted and old and old.inputs.tolist() == one.inputs.tolist():
                same = alike(one, old, how, about.top_k)
                compared["drift"] = None if same is None else 1 - same
            if key != GLOBAL and "agreement" in wanted:
                compared["agreement"] = mean(alike(one, o, how, about.top_k) for o in others)
            if key != GLOBAL and "global_agreement" in wanted and GLOBAL in found:
                compared["global_agreement"] = alike(one, found[GLOBAL], how, about.top_k)
            scores |= {f"{n}_{how}": value for n, value in compared.items() if value is not None}
        maps = zip(one.relevance, one.present, strict=True)
        mute = sum(not informative(a[None, there])[0] for a, there in maps)
        counted = {"uninformative": mute} if mute else {}
        rows.append(
            {"explainer": "random", "model": key[0], "client": key[1], **scores, **counted}
        )
    columns: dict[str, float] = {}
    for row in rows:
        for name in row.keys() - {"explainer", "model", "client", "uninformative"}:
            of_kind = mean(r.get(name) for r in rows if r["model"] == row["model"])
            if of_kind is not None:
                columns[f"random/{PREFIXES[row['model']]}{name}"] = of_kind
    return rows, columns


def not_finite() -> Found:
    found = models(lengths=SHORT)
    for key in KEYS[1:]:
        found[key].relevance[1] = np.nan
    found[GLOBAL].relevance[0] = 0.5
    return found


def of_few_words() -> Found:
    found = models(lengths=(P, 1, 1))
    found["cohort", 5].relevance[1] = found["cohort", 2].relevance[1]
    return found


def with_scores() -> Found:
    nan, found = np.nan, models()
    of_models = [[0.5, nan, 0.25], [nan] * 3, [nan, 1.0, 0.5], [1.0, 1.0, 0.25]]
    for key, values in zip(KEYS, of_models, strict=True):
        found[key].scores["deletion"] = np.array(values)
    return found


BEFORE = models(KEYS[:3], seed=90)
CASES: dict[str, tuple[Found, Found, dict[str, Any]]] = {
    **{f"k={k}": (models(), BEFORE, {"top_k": k}) for k in (None, 1, 3, 12)},
    **{
        f"documents, k={k}": (models(lengths=SHORT), models(KEYS[:3], SHORT, 90), {"top_k": k})
        for k in (None, 3)
    },
    **{f"{name} alone": (models(), BEFORE, {"scores": [name]}) for name in SHARED},
    "nothing has changed": (models(), models(), {}),
    "the global model": (models([GLOBAL]), BEFORE, {}),
    "a client alone": (models(KEYS[:2]), {}, {}),
    "two kinds of clients' models": (models([*KEYS, *PERSONAL]), models(PERSONAL), {}),
    "others the time before": (models(PERSONAL), models([("cohort", 2), ("personal", 7)]), {}),
    "other inputs before": (
        models(),
        {key: replace(one, inputs=np.array([4, 8, 10])) for key, one in BEFORE.items()},
        {},
    ),
    "few words": (of_few_words(), {}, {}),
    "not finite, or all alike": (not_finite(), models(lengths=SHORT), {}),
    "scores": (with_scores(), {}, {"scores": ["deletion"]}),
    "scores of nothing": (
        models([GLOBAL], scores={"deletion": np.full(m, np.nan)}),
        *({}, {"scores": ["deletion"]}),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_and_columns(case: str) -> None:
    found, before, fields = CASES[case]
    about = section(**fields)
    last = compared(before, about).last if before else {}
    made = compared(found, about, last)
    rows, columns = slowly(found, about, before)
    assert made.columns == pytest.approx(columns, abs=1e-12)
    assert len(made.rows) == len(rows)
    for row, expected in zip(made.rows, rows, strict=True):
        assert row == pytest.approx(expected, abs=1e-12)
    assert made.maps == []


def test_each_explainer_is_by_itself() -> None:
    one, other = models(), models(seed=40)
    about = section(explainers=["random", "gradient"])
    made = recorded(about, {"random": one, "gradient": other}, {})
    alone = [compared(one, about), recorded(about, {"gradient": other}, {})]
    assert made.columns == alone[0].columns | alone[1].columns
    assert made.rows == alone[0].rows + alone[1].rows


def test_drift_is_from_the_time_before_alone() -> None:
    """Whoever was not explained then has none; maps are not piled up."""
    last = compared(models([GLOBAL]), before=compared(models(KEYS[:2])).last).last
    assert set(last["random"]) == {"global"}
    assert compared(models(), section("agreement", maps=True)).last == {}
    # Maps of another size are no run's own: somebody has edited the checkpoint.
    last = compared(models(), section("drift")).last
    for old in last["random"].values():
        old["relevance"] = old["relevance"][:, :5]
    assert not compared(models(), section("drift"), last).columns


def test_maps() -> None:
    curves = {"deletion": np.arange(6.0).reshape(m, 2)}
    found = models(KEYS[:2], SHORT, curves=curves)
    made = compared(found, section("deletion", "drift", maps=True))
    assert len(made.maps) == 2 * m
    for i, row in enumerate(made.maps):
        key, k = KEYS[i // m], i % m
        relevance = found[key].relevance[k, : SHORT[k]]
        for name, array in {"relevance": relevance, "deletion": curves["deletion"][k]}.items():
            np.testing.assert_array_equal(row.pop(name), array)
        about = {"explainer": "random", "model": key[0], "client": key[1]}
        assert row == {**about, "input": [4, 8, 9][k]}
    last: Mapping[str, Any] = made.last["random"]["cohort 2"]
    np.testing.assert_array_equal(last["relevance"], found["cohort", 2].relevance)


@examples(25)
@given(st.permutations(range(4)), st.integers(0, 9))
def test_the_order_of_clients_changes_nothing(order: list[int], seed: int) -> None:
    clients: list[Key] = [("cohort", k) for k in range(4)]
    found = {key: explained(10 * seed + i) for i, key in enumerate([GLOBAL, *clients])}
    shuffled = {key: found[key] for key in (*(clients[i] for i in order), GLOBAL)}
    before = compared({key: explained(7) for key in found}).last
    one, other = compared(found, before=before), compared(shuffled, before=before)
    assert one.columns == other.columns
    in_order = [(row["model"], row["client"]) for row in one.rows]
    assert one.rows == sorted(
        other.rows, key=lambda row: in_order.index((row["model"], row["client"]))
    )
