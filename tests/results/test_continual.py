"""Measures of continual learning, against tables worked out by hand."""

from __future__ import annotations

import math
from dataclasses import asdict

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import ran
from fedsim.objectives.continual import Continual, continual

nan = math.nan

# client -> round -> (task under way, accuracy of each task)
Rounds = dict[int, dict[int, tuple[int, list[float]]]]


def table(clients: Rounds, classes: int = 4, unseen: bool = True) -> pd.DataFrame:
    rows = [
        {
            **{"round": r, "client": c, "task": t, "seen": t <= now, "classes": classes},
            **{"loss": 1 - a, "accuracy": a},
        }
        for c, own in clients.items()
        for r, (now, found) in own.items()
        for t, a in enumerate(found)
        if not math.isnan(a) and (unseen or t <= now)
    ]
    return pd.DataFrame(rows).sort_values(["round", "client", "task"], ignore_index=True)


def check(found: Continual, **expected: float) -> None:
    for name, value in asdict(found).items():
        if name in expected:
            assert value == pytest.approx(expected.pop(name), nan_ok=True), name
    assert not expected


ONE: Rounds = {
    0: {
        1: (0, [0.5, 0.3, 0.2]),
        2: (0, [0.9, 0.4, 0.3]),
        3: (1, [0.7, 0.6, 0.1]),
        4: (1, [0.8, 0.8, 0.5]),
        5: (2, [0.6, 0.9, 0.7]),
        6: (2, [0.4, 0.7, 1.0]),
    }
}


# What is on record, with gaps, and the measures that follow; without gaps, see below.
HISTORIES: dict[str, tuple[Rounds, dict[str, float]]] = {
    "rounds 4 and 8 of 9 are evaluated, and the last; three rounds a task": (
        {0: {4: (1, [0.9, 0.5, 0.3]), 8: (2, [0.7, 0.6, 0.8]), 9: (2, [0.5, 0.4, 0.9])}},
        {
            "tta": 0.6,
            "forgetting": ((0.9 - 0.5) + (0.6 - 0.4)) / 2,
            "backward": 0.4 - 0.5,  # nothing is known of the first task's end
            "forward": 0.3 - 0.25,  # nor of the second before it began
            "first_round": (0.9 + 0.5 + 0.8) / 3,
        },
    ),
    # A model of its own came late: until then there is no row of the client.
    "a client that missed a task counts with those on record": (
        {**ONE, 1: {r: row for r, row in ONE[0].items() if r > 2}},
        {
            "tta": 0.7,
            "forgetting": ((0.9 - 0.4) + (0.9 - 0.7) + (0.8 - 0.4) + (0.9 - 0.7)) / 4,
            "backward": ((0.4 - 0.9) + (0.7 - 0.8) + (0.7 - 0.8)) / 3,
            "forward": (0.15 + 0.25 + 0.25) / 3,
            "first_round": (0.5 + 0.6 + 0.7 + 0.7 + 0.6 + 0.7) / 6,
        },
    ),
    # One that it never took part in, as where each task has a model of its own.
    "a task of which a client has no model does not count": (
        {
            0: {1: (0, [0.5, nan]), 2: (1, [0.4, 0.3]), 3: (1, [0.3, 0.4])},
            1: {1: (0, [nan, nan]), 2: (1, [nan, 0.6]), 3: (1, [nan, 0.8])},
        },
        {
            "tta": (0.3 + 0.4 + 0.8) / 3,
            "forgetting": 0.2,
            "backward": -0.2,
            "first_round": (0.5 + 0.3 + 0.6) / 3,
        },
    ),
    # A mean that left the client out would be of other tasks than it says.
    "who is missing in the last round has no result": (
        {**ONE, 1: {r: row for r, row in ONE[0].items() if r < 6}},
        {"tta": nan, "forgetting": nan, "first_round": (0.5 + 0.6 + 0.7) / 3},
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_measures_worked_out_by_hand(name: str) -> None:
    clients, expected = HISTORIES[name]
    check(continual(table(clients)), **expected)


def test_the_number_of_classes_is_each_tasks_own() -> None:
    tasks = table({0: {1: (0, [0.5, 0.6]), 2: (1, [0.5, 0.7])}}, classes=2)
    tasks["classes"] = tasks["task"].map({0: 10, 1: 2})
    check(continual(tasks), forward=0.6 - 0.5)


def test_without_rows_of_tasks_to_come_there_is_no_forward_transfer() -> None:
    whole, seen = (asdict(continual(table(ONE, unseen=of_all))) for of_all in (True, False))
    assert math.isnan(seen["forward"])
    assert {**seen, "forward": whole["forward"]} == whole


def test_an_empty_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no recorded tasks; its partition has no sequence of"):
        continual(pd.DataFrame())
    for none in (table(ONE).iloc[:0], ran(train={"rounds": 1}).tasks):
        with pytest.raises(ValueError, match="no sequence of tasks"):
            continual(none)


@st.composite
def histories(draw: st.DrawFn) -> tuple[Rounds, int, int]:
    K, T, each = (draw(st.integers(1, 3)) for _ in range(3))
    accuracy = st.integers(0, 100).map(lambda n: n / 100)
    own = st.lists(accuracy, min_size=T, max_size=T)
    R = draw(st.integers(1, T * each))  # a run may be under way
    rounds = {k: {t: ((t - 1) // each, draw(own)) for t in range(1, R + 1)} for k in range(K)}
    return rounds, R, each


@given(histories())
def test_any_history_as_written_out(history: tuple[Rounds, int, int]) -> None:
    rounds, R, each = history
    T = (R - 1) // each + 1  # tasks that have begun
    acc = {(k, t, r): found[t] for k, own in rounds.items() for r, (_, found) in own.items()
           for t in range(T)}  # fmt: skip
    pairs = [(k, t) for k in rounds for t in range(T)]
    past = [(k, t) for k, t in pairs if t < T - 1]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else nan

    check(
        continual(table(rounds)),
        tta=mean([acc[k, t, R] for k, t in pairs]),
        forgetting=mean(
            [max(acc[k, t, r] for r in range(t * each + 1, R + 1)) - acc[k, t, R] for k, t in past]
        ),
        backward=mean([acc[k, t, R] - acc[k, t, (t + 1) * each] for k, t in past]),
        forward=mean([acc[k, t, t * each] - 0.25 for k, t in pairs if t > 0]),
        first_round=mean([acc[k, t, t * each + 1] for k, t in pairs]),
    )


@pytest.mark.parametrize(("method", "every"), [("fedavg", 1), ("local", 3)])
def test_of_a_run(method: str, every: int) -> None:
    tasks = [[["0", "1"], ["2", "3"]], [["4", "5"], ["6", "7"]]]
    done = ran(
        partition={"kind": "own_tasks", "tasks": tasks},
        **{"method": {"name": method}, "train": {"rounds": 4}, "evaluate": {"every": every}},
    )
    tasks, found = done.tasks, continual(done.tasks)
    last = tasks[tasks["round"] == 4]
    assert found.tta == pytest.approx(last["accuracy"].mean())
    assert found.tta == pytest.approx(done.rounds["accuracy"].iloc[-1])
    if every == 1:
        before = tasks[(tasks["round"] == 2) & (tasks["task"] == 1)]
        assert found.forward == pytest.approx((before["accuracy"] - 0.5).mean())
